package ratelimitsvc

import (
	"errors"
	"io"
	"log/slog"
	"net/http"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
)

// maxBody is the most bytes that a request may have as JSON.
const maxBody = 1 << 20

// serveJSON is the rate limit protocol over HTTP, as the reference has it: a request as
// protobuf's JSON, answered with the response as JSON and 200, or 429 when it is over a
// limit. The rate headers are headers of the answer as well. How long a body may take to
// arrive is the server's business.
func (s *Service) serveJSON(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		code := http.StatusBadRequest
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			code = http.StatusRequestEntityTooLarge
		}
		http.Error(w, "reading the body: "+err.Error(), code)
		return
	}
	req := &rlsv3.RateLimitRequest{}
	if err := protojson.Unmarshal(body, req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	response, err := s.respond(withReceipts(r), req, httpCaller(r))
	if err != nil {
		http.Error(w, status.Convert(err).Message(), httpCode(err))
		return
	}
	text, err := protojson.Marshal(response)
	if err != nil {
		s.config.Logger.LogAttrs(r.Context(), slog.LevelError, "writing a response as JSON", slog.Any("err", err))
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	for _, h := range response.GetResponseHeadersToAdd() {
		w.Header().Set(h.GetKey(), h.GetValue())
	}
	w.Header().Set("Content-Type", "application/json")
	if response.GetOverallCode() == rlsv3.RateLimitResponse_OVER_LIMIT {
		w.WriteHeader(http.StatusTooManyRequests)
	}
	_, _ = w.Write(text) //nolint:gosec // JSON, said to be so; the client may be gone
}

// httpCode is the HTTP status of an error of [Service.respond].
func httpCode(err error) int {
	switch status.Code(err) { //nolint:exhaustive // these are all that there are
	case codes.InvalidArgument:
		return http.StatusBadRequest
	case codes.PermissionDenied:
		return http.StatusForbidden
	}
	return http.StatusInternalServerError
}
