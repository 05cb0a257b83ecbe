package ratelimitsvc

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
)

// A caller is who asks.
type caller struct {
	sans    []string   // the names in its verified certificate
	address netip.Addr // invalid if it has none
}

func grpcCaller(ctx context.Context) caller {
	var c caller
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			c.sans = verifiedNames(&info.State)
		}
		if address, ok := p.Addr.(*net.TCPAddr); ok {
			c.address = address.AddrPort().Addr()
		}
	}
	return c
}

// receiptsOf returns what came beside a request under [ReceiptKey].
func receiptsOf(ctx context.Context) []string {
	return metadata.ValueFromIncomingContext(ctx, ReceiptKey)
}

// withReceipts puts the headers of a request where gRPC puts its metadata.
func withReceipts(r *http.Request) context.Context {
	return metadata.NewIncomingContext(r.Context(), metadata.MD{ReceiptKey: r.Header.Values(ReceiptKey)})
}

func httpCaller(r *http.Request) caller {
	var c caller
	if r.TLS != nil {
		c.sans = verifiedNames(r.TLS)
	}
	if address, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		c.address = address.Addr()
	}
	return c
}

// verifiedNames returns the URIs and DNS names of a certificate that an authority of
// ours has signed; one that is only shown says nothing.
func verifiedNames(state *tls.ConnectionState) []string {
	if len(state.VerifiedChains) == 0 {
		return nil
	}
	leaf := state.VerifiedChains[0][0]
	names := make([]string, 0, len(leaf.URIs)+len(leaf.DNSNames))
	for _, uri := range leaf.URIs {
		names = append(names, uri.String())
	}
	return append(names, leaf.DNSNames...)
}

// permit returns what a caller may ask; the error is PERMISSION_DENIED if that is nothing,
// or not this domain.
func (s *Service) permit(c caller, domain string) (policy.Client, error) {
	client, ok := s.config.Clients.Find(c.sans, c.address)
	if !ok {
		return client, status.Errorf(codes.PermissionDenied, "client: nothing is allowed to %q at %s", c.sans, c.address)
	}
	if !client.MayAsk(domain) {
		return client, status.Errorf(codes.PermissionDenied, "domain: %q is not one that this client may ask for", truncate(domain))
	}
	return client, nil
}
