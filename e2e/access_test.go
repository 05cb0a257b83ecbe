package e2e_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/weir-dev/weir/internal/certtest"
	"github.com/weir-dev/weir/internal/child"
	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// The binary with TLS on both ports: who may ask what follows from certificates, and a
// refund goes the same way as the charge.
func TestServeWithCertificates(t *testing.T) {
	t.Parallel()

	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ca := certtest.NewAuthority(t, "ca")
	certificate, key := ca.Issue(t, certtest.Tomorrow())
	grpcAddress, httpAddress := freeAddress(t), freeAddress(t)
	var log logBuffer
	showOnFailure(t, "weir serve", &log)
	command := exec.Command(weirBinary(t), "serve",
		write("policy.yaml", []byte("domain: test\ndescriptors:\n  - {key: a, quota: {daily: 10}}\n  - {key: a, value: named, quota: {daily: 1}}\n")),
		"--database-url", pgtest.NewDatabase(t),
		"--grpc-listen", grpcAddress, "--http-listen", httpAddress, "--xds-listen", "",
		"--clients", write("clients.yaml", []byte("clients:\n  - {san: spiffe://mesh/envoy, refunds: true}\n  - {san: spiffe://mesh/other}\n")),
		"--tls-cert", write("tls.crt", certificate), "--tls-key", write("tls.key", key), "--tls-client-ca", write("ca.crt", ca.PEM))
	command.Stdout, command.Stderr = &log, &log
	process, err := child.Start(command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := process.Stop(syscall.SIGTERM, 20*time.Second); err != nil || process.Err() != nil {
			t.Errorf("stopping weir serve: %v, %v", err, process.Err())
		}
	})

	over := func(config *tls.Config) *http.Client {
		return &http.Client{Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}, Timeout: 30 * time.Second}
	}
	mesh := ca.Client(t, ca, "spiffe://mesh/envoy")
	eventually(t, startTimeout, "weir serve is healthy", func() error {
		// Without a certificate, as Kubernetes asks.
		response, err := over(ca.Client(t, nil)).Get("https://" + httpAddress + "/healthcheck")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("status %d", response.StatusCode)
		}
		return nil
	})

	ask := func(config *tls.Config, receipt string, cost int64) (*rlsv3.RateLimitResponse, error) {
		conn, err := grpc.NewClient(grpcAddress, grpc.WithTransportCredentials(credentials.NewTLS(config)))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx := t.Context()
		if receipt != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, ratelimitsvc.ReceiptKey, receipt)
		}
		req := &rlsv3.RateLimitRequest{Domain: "test"}
		req.Descriptors = append(req.Descriptors, hits(cost, "a=1"))
		return rlsv3.NewRateLimitServiceClient(conn).ShouldRateLimit(ctx, req)
	}
	charged, err := ask(mesh, "", 8)
	if err != nil || charged.GetStatuses()[0].GetLimitRemaining() != 2 {
		t.Fatalf("a charge: %v, %v", charged, err)
	}
	if response, err := ask(mesh, receiptOf(charged), -5); err != nil || response.GetStatuses()[0].GetLimitRemaining() != 7 {
		t.Errorf("a refund: %v, %v", response, err)
	}
	if _, err := ask(mesh, "garbage", -5); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a refund with a malformed receipt: %v", err)
	}
	for name, test := range map[string]struct {
		config *tls.Config
		cost   int64
		want   codes.Code
	}{
		"a refund of who may not":   {ca.Client(t, ca, "spiffe://mesh/other"), -5, codes.PermissionDenied},
		"a client that is nobody's": {ca.Client(t, ca, "spiffe://mesh/stranger"), 1, codes.PermissionDenied},
		"no certificate":            {ca.Client(t, nil), 1, codes.Unavailable},
	} {
		if _, err := ask(test.config, "", test.cost); status.Code(err) != test.want {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}

	// A consumer that the policy names was enrolled when it loaded.
	named := func() rlsv3.RateLimitResponse_Code {
		conn, err := grpc.NewClient(grpcAddress, grpc.WithTransportCredentials(credentials.NewTLS(mesh)))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		req := &rlsv3.RateLimitRequest{Domain: "test"}
		req.Descriptors = append(req.Descriptors, hits(1, "a=named"))
		response, err := rlsv3.NewRateLimitServiceClient(conn).ShouldRateLimit(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		return response.GetOverallCode()
	}
	if first, second := named(), named(); first != rlsv3.RateLimitResponse_OK || second != rlsv3.RateLimitResponse_OVER_LIMIT {
		t.Errorf("two requests of 1 a day: %v, %v", first, second)
	}

	const body = `{"domain": "test", "descriptors": [{"entries": [{"key": "a", "value": "1"}], "hitsAddend": "7"}]}`
	for _, test := range []struct {
		config *tls.Config
		want   int
	}{
		{mesh, http.StatusOK},              // takes the 7 that are left
		{mesh, http.StatusTooManyRequests}, // and then there are none
		{ca.Client(t, ca, "spiffe://mesh/stranger"), http.StatusForbidden},
		{ca.Client(t, nil), http.StatusForbidden},
	} {
		response, err := over(test.config).Post("https://"+httpAddress+"/json", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != test.want {
			t.Errorf("POST /json = %d %s, %v, want %d", response.StatusCode, text, err, test.want)
		}
		if test.want != http.StatusForbidden {
			if err := protojson.Unmarshal(text, &rlsv3.RateLimitResponse{}); err != nil {
				t.Errorf("the answer is %s: %v", text, err)
			}
		}
		if refused := test.want == http.StatusTooManyRequests; (response.Header.Get("Retry-After") != "") != refused {
			t.Errorf("headers of %d: %v", test.want, response.Header)
		}
	}
}
