package xds

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
)

const (
	maxText  = 1 << 10 // bytes kept of a text that a client chose
	maxNames = 10_000  // resource names in one request, and subscribed in one stream
)

// A Node is the state of one connected client.
type Node struct {
	ID      string // as its bootstrap says
	Cluster string
	Version string // Envoy's, such as "1.40.0"; empty where the client doesn't say
	Address string // from where it is connected
	Delta   bool   // whether it asked for incremental updates
	Since   time.Time

	// Types holds what it has asked for, by type URL.
	Types map[string]TypeState
}

// A TypeState is how far a client is with resources of one type.
type TypeState struct {
	Sent  string // the version that it was last sent; empty for none
	Acked string // the version that it last accepted; empty for none
	Nack  *Nack  // its last refusal; nil for none, and once it accepted a later version
}

// A Nack is a client's refusal of a version.
type Nack struct {
	Version string
	Detail  string // in the client's words
	At      time.Time
}

// A streamKey names a stream: each of the two protocols counts its own.
type streamKey struct {
	delta bool
	id    int64
}

// A stream is a Node with what the protocol needs.
type stream struct {
	node       Node
	nonces     map[string]string // of the last response, by type URL
	subscribed int               // names, over all types
	known      bool              // whether the node has introduced itself
}

// nodes implements the callbacks of both protocols.
type nodes struct {
	logger *slog.Logger

	mu      sync.Mutex
	streams map[streamKey]*stream
}

func newNodes(logger *slog.Logger) *nodes {
	return &nodes{logger: logger, streams: make(map[streamKey]*stream)}
}

func (n *nodes) list() []Node {
	n.mu.Lock()
	defer n.mu.Unlock()

	list := make([]Node, 0, len(n.streams))
	for _, s := range n.streams {
		if !s.known {
			continue
		}
		node := s.node
		node.Types = maps.Clone(s.node.Types)
		list = append(list, node)
	}
	slices.SortFunc(list, func(a, b Node) int {
		return cmp.Or(strings.Compare(a.ID, b.ID), a.Since.Compare(b.Since))
	})
	return list
}

func (n *nodes) opened(ctx context.Context, key streamKey) {
	s := &stream{
		node:   Node{Delta: key.delta, Since: time.Now(), Types: make(map[string]TypeState)},
		nonces: make(map[string]string),
	}
	if p, ok := peer.FromContext(ctx); ok {
		s.node.Address = p.Addr.String()
	}
	n.mu.Lock()
	n.streams[key] = s
	n.mu.Unlock()
}

func (n *nodes) closed(key streamKey) {
	n.mu.Lock()
	s := n.streams[key]
	delete(n.streams, key)
	n.mu.Unlock()

	if s != nil && s.known {
		n.logger.Info("envoy disconnected from the control plane", s.attrs()...)
	}
}

// A request is what the two protocols' requests share.
type request struct {
	node        *corev3.Node
	typeURL     string
	nonce       string
	refusal     *status.Status // nil for an acknowledgement or a new request
	version     string         // state of the world only
	subscribe   int            // names
	unsubscribe int
}

// requested notes a request. It returns the version that the client was last sent,
// if this request answers that response, else "". An error ends the stream.
func (n *nodes) requested(key streamKey, r request) (string, error) {
	// The cache keeps a place for an answer of each type that it knows, and would
	// stand still on more.
	if cachev3.GetResponseType(r.typeURL) == types.UnknownType {
		return "", grpcstatus.Errorf(codes.InvalidArgument, "resources of type %q are not served here", clip(r.typeURL))
	}

	n.mu.Lock()
	s := n.streams[key]
	if s == nil {
		n.mu.Unlock()
		return "", grpcstatus.Error(codes.Internal, "the stream was not opened")
	}
	if key.delta {
		s.subscribed = max(0, s.subscribed+r.subscribe-r.unsubscribe)
	} else {
		s.subscribed = r.subscribe
	}
	if s.subscribed > maxNames {
		n.mu.Unlock()
		return "", grpcstatus.Errorf(codes.ResourceExhausted, "more than %d resource names", maxNames)
	}
	introduced := !s.known && r.node != nil
	if introduced {
		s.introduce(r.node)
	}
	state := s.node.Types[r.typeURL]
	answers := r.nonce != "" && r.nonce == s.nonces[r.typeURL]
	var acked, nacked bool
	switch {
	case !answers:
	case r.refusal != nil:
		nacked = true
		state.Nack = &Nack{Version: state.Sent, Detail: clip(r.refusal.GetMessage()), At: time.Now()}
	case key.delta || r.version == state.Sent:
		acked = state.Acked != state.Sent
		state.Acked, state.Nack = state.Sent, nil
	}
	s.node.Types[r.typeURL] = state
	attrs := s.attrs()
	n.mu.Unlock()

	if introduced {
		n.logger.Info("envoy connected to the control plane", attrs...)
	}
	attrs = append(attrs, slog.String("type", r.typeURL), slog.String("version", state.Sent))
	switch {
	case nacked:
		n.logger.Warn("envoy refused a configuration", append(attrs, slog.String("detail", state.Nack.Detail))...)
	case acked:
		n.logger.Info("envoy accepted a configuration", attrs...)
	}
	if !answers {
		return "", nil
	}
	return state.Sent, nil
}

func (n *nodes) responded(key streamKey, typeURL, version, nonce string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s := n.streams[key]; s != nil {
		state := s.node.Types[typeURL]
		state.Sent = version
		s.node.Types[typeURL] = state
		s.nonces[typeURL] = nonce
	}
}

func (s *stream) introduce(node *corev3.Node) {
	s.known = true
	s.node.ID, s.node.Cluster = clip(node.GetId()), clip(node.GetCluster())
	if v := node.GetUserAgentBuildVersion().GetVersion(); v != nil {
		s.node.Version = fmt.Sprintf("%d.%d.%d", v.GetMajorNumber(), v.GetMinorNumber(), v.GetPatch())
	}
}

func (s *stream) attrs() []any {
	return []any{
		slog.String("node", s.node.ID),
		slog.String("cluster", s.node.Cluster),
		slog.String("address", s.node.Address),
	}
}

// clip bounds a text that a client chose.
func clip(s string) string {
	if len(s) > maxText {
		return strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return s
}

// OnStreamOpen implements the callbacks of the state of the world.
func (n *nodes) OnStreamOpen(ctx context.Context, id int64, _ string) error {
	n.opened(ctx, streamKey{id: id})
	return nil
}

// OnStreamClosed implements the callbacks of the state of the world.
func (n *nodes) OnStreamClosed(id int64, _ *corev3.Node) { n.closed(streamKey{id: id}) }

// OnStreamRequest implements the callbacks of the state of the world.
func (n *nodes) OnStreamRequest(id int64, r *discoveryv3.DiscoveryRequest) error {
	sent, err := n.requested(streamKey{id: id}, request{
		node:      r.GetNode(),
		typeURL:   r.GetTypeUrl(),
		nonce:     r.GetResponseNonce(),
		refusal:   r.GetErrorDetail(),
		version:   r.GetVersionInfo(),
		subscribe: len(r.GetResourceNames()),
	})
	// A refusal carries the last version that the client accepted, and the cache
	// sends to whoever is not on the current one: it would send the same again, at
	// once and for ever. The client has seen what it was sent.
	if sent != "" {
		r.VersionInfo = sent
	}
	return err
}

// OnStreamResponse implements the callbacks of the state of the world.
func (n *nodes) OnStreamResponse(_ context.Context, id int64, _ *discoveryv3.DiscoveryRequest, r *discoveryv3.DiscoveryResponse) {
	n.responded(streamKey{id: id}, r.GetTypeUrl(), r.GetVersionInfo(), r.GetNonce())
}

// OnDeltaStreamOpen implements the callbacks of incremental updates.
func (n *nodes) OnDeltaStreamOpen(ctx context.Context, id int64, _ string) error {
	n.opened(ctx, streamKey{delta: true, id: id})
	return nil
}

// OnDeltaStreamClosed implements the callbacks of incremental updates.
func (n *nodes) OnDeltaStreamClosed(id int64, _ *corev3.Node) {
	n.closed(streamKey{delta: true, id: id})
}

// OnStreamDeltaRequest implements the callbacks of incremental updates.
func (n *nodes) OnStreamDeltaRequest(id int64, r *discoveryv3.DeltaDiscoveryRequest) error {
	_, err := n.requested(streamKey{delta: true, id: id}, request{
		node:        r.GetNode(),
		typeURL:     r.GetTypeUrl(),
		nonce:       r.GetResponseNonce(),
		refusal:     r.GetErrorDetail(),
		subscribe:   len(r.GetResourceNamesSubscribe()) + len(r.GetInitialResourceVersions()),
		unsubscribe: len(r.GetResourceNamesUnsubscribe()),
	})
	return err
}

// OnStreamDeltaResponse implements the callbacks of incremental updates.
func (n *nodes) OnStreamDeltaResponse(id int64, _ *discoveryv3.DeltaDiscoveryRequest, r *discoveryv3.DeltaDiscoveryResponse) {
	n.responded(streamKey{delta: true, id: id}, r.GetTypeUrl(), r.GetSystemVersionInfo(), r.GetNonce())
}

// OnFetchRequest implements the callbacks of REST, which is not served.
func (*nodes) OnFetchRequest(context.Context, *discoveryv3.DiscoveryRequest) error {
	return grpcstatus.Error(codes.Unimplemented, "only streams are served")
}

// OnFetchResponse implements the callbacks of REST, which is not served.
func (*nodes) OnFetchResponse(*discoveryv3.DiscoveryRequest, *discoveryv3.DiscoveryResponse) {}
