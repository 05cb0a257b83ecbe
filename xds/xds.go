// Package xds is the control plane: it serves what package envoy builds to every
// Envoy that asks.
//
// A [Server] speaks the Aggregated Discovery Service, incrementally (delta) or as
// the state of the world, as each client prefers: LDS, RDS, CDS, EDS and ECDS.
// [Server.Publish] replaces what it serves; [Server.Nodes] tells who is connected
// and what each has taken.
//
// # What is never sent
//
//   - A resource that has not changed. Versions are hashes of content, so a
//     client that reconnects, even to another replica, is sent only what differs.
//   - A resource again that the client has just refused. Envoy would accept an
//     identical filter configuration the second time without applying it.
//   - A resource that names another one that isn't there.
//   - Wasm code that Envoy would have to fetch. It accepts such a filter update at
//     once and then passes all traffic with no filter. Code is a file or inline.
//
// # What an acknowledgement proves
//
// Little: after a reconnection a client may be sent what it had refused, since the
// server remembers refusals for as long as the stream lives, and then acknowledge
// it. Who publishes should give each filter configuration a version of its own.
//
// # Memory
//
// What is kept for a client is bounded and is dropped when its stream ends.
package xds

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/log"
	"github.com/envoyproxy/go-control-plane/pkg/server/sotw/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"

	"github.com/weir-dev/weir/envoy"
)

// A Config is a server's configuration. The zero value is complete.
type Config struct {
	// Logger receives connections and acknowledgements, and at warning level
	// every refusal. Defaults to none.
	Logger *slog.Logger
}

// A Server is a control plane. It is safe for concurrent use.
type Server struct {
	cache cachev3.SnapshotCache
	ads   discoveryv3.AggregatedDiscoveryServiceServer
	close context.CancelFunc
	nodes *nodes

	publishing sync.Mutex
}

// everyNode is the key of the one snapshot.
const everyNode = "every node"

// sameForAll maps every node to that snapshot.
type sameForAll struct{}

// ID implements [cachev3.NodeHash].
func (sameForAll) ID(*corev3.Node) string { return everyNode }

// NewServer returns a server that answers nothing until something is published:
// its clients wait. [Server.Close] ends it.
func NewServer(config Config) *Server {
	logger := config.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	nodes := newNodes(logger)
	quiet := log.LoggerFuncs{}
	cache := cachev3.NewSnapshotCache(true, sameForAll{}, quiet)
	return &Server{
		cache: cache,
		// Ordered, so that a client hears of a cluster before a route to it.
		ads:   serverv3.NewServer(ctx, cache, nodes, sotw.WithOrderedADS(), sotw.WithLogger(quiet)),
		close: cancel,
		nodes: nodes,
	}
}

// Register adds the server to a gRPC server.
func (s *Server) Register(registrar grpc.ServiceRegistrar) {
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(registrar, s.ads)
}

// Publish serves resources from now on, to those connected and to those to come.
// It checks them first, and on an error what was published before stays. What has
// not changed is not sent again. The resources may be changed afterwards.
//
// Publish returns when the updates are under way, not when clients have them; see
// [Server.Nodes]. It does nothing when ctx has ended.
func (s *Server) Publish(ctx context.Context, resources *envoy.Resources) error {
	snapshot, err := newSnapshot(resources)
	if err != nil {
		return fmt.Errorf("checking xDS resources: %w", err)
	}

	// One at a time, so that what was published last is what stays.
	s.publishing.Lock()
	defer s.publishing.Unlock()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("publishing xDS resources: %w", err)
	}
	// To the end, or some clients would miss it. It doesn't block: each stream has
	// room for an update of each type.
	if err := s.cache.SetSnapshot(context.WithoutCancel(ctx), everyNode, snapshot); err != nil {
		return fmt.Errorf("publishing xDS resources: %w", err)
	}
	return nil
}

// Nodes returns the state of each connected client, by node id, then by the time
// of its connection.
func (s *Server) Nodes() []Node { return s.nodes.list() }

// Close ends all streams, and each one that comes later. Without it a gRPC
// server's graceful stop would wait for ever.
func (s *Server) Close() { s.close() }
