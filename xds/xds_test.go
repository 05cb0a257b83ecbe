package xds_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	xdstypev3 "github.com/cncf/xds/go/xds/type/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	wasmfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/wasm/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/internal/envoyproc/envoytest"
	"github.com/weir-dev/weir/xds"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// build makes the resources of an Envoy whose filter takes consumers from header.
func build(t *testing.T, c envoy.Config, version, header string) *envoy.Resources {
	t.Helper()
	var err error
	c.FilterConfig, err = config.Compose(version, "ingest", "weir_ratelimit", []byte(
		`{"timeout":"5s","rules":[{"descriptors":[{"entries":[{"key":"consumer","header":"`+header+`","missing":"skip"}]}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Resources()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func sample(t *testing.T, version string) *envoy.Resources {
	t.Helper()
	return build(t, envoy.Config{
		Gateway:  "127.0.0.1:10000",
		Upstream: "127.0.0.1:8000",
		Service:  "127.0.0.1:8081",
		Module:   envoy.Module{Path: "/filter.wasm"},
	}, version, "x-consumer")
}

// secure is sample with TLS to the service.
func secure(t *testing.T) *envoy.Resources {
	t.Helper()
	return build(t, envoy.Config{
		Gateway:    "127.0.0.1:10000",
		Upstream:   "127.0.0.1:8000",
		Service:    "127.0.0.1:8081",
		ServiceTLS: &envoy.TLS{CA: "/ca.crt"},
		Module:     envoy.Module{Path: "/filter.wasm"},
	}, "1", "x-consumer")
}

// A bench is a running control plane and a client's connection to it.
type bench struct {
	server *xds.Server
	client discoveryv3.AggregatedDiscoveryServiceClient
	log    *syncBuffer
}

func setup(t *testing.T) *bench {
	t.Helper()
	b := &bench{log: new(syncBuffer)}
	b.server = xds.NewServer(xds.Config{Logger: slog.New(slog.NewTextHandler(b.log, nil))})
	grpcServer := grpc.NewServer()
	b.server.Register(grpcServer)
	listener := bufconn.Listen(1 << 20)
	done := make(chan error, 1)
	go func() { done <- grpcServer.Serve(listener) }()

	conn, err := grpc.NewClient("passthrough:xds",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	b.client = discoveryv3.NewAggregatedDiscoveryServiceClient(conn)
	t.Cleanup(func() {
		// With streams open: Close must have ended them.
		b.server.Close()
		grpcServer.GracefulStop()
		if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("serving: %v", err)
		}
		_ = conn.Close()
	})
	return b
}

func (b *bench) publish(t *testing.T, r *envoy.Resources) {
	t.Helper()
	if err := b.server.Publish(t.Context(), r); err != nil {
		t.Fatal(err)
	}
}

// A response is what both protocols' responses share.
type response struct {
	typeURL, version, nonce string
	resources               map[string]*anypb.Any
}

// A conversation is a client's stream, in either protocol.
type conversation interface {
	// subscribe asks for resources by name, or for all with none.
	subscribe(typeURL string, names ...string) error
	// answer accepts a response, or refuses it with the text.
	answer(r response, refusal string) error
	receive() (response, error)
}

var node = &corev3.Node{
	Id: "gateway-1", Cluster: "edge",
	UserAgentVersionType: &corev3.Node_UserAgentBuildVersion{UserAgentBuildVersion: &corev3.BuildVersion{
		Version: &typev3.SemanticVersion{MajorNumber: 1, MinorNumber: 40},
	}},
}

// protocols opens a conversation in each protocol.
var protocols = map[string]func(context.Context, *bench) (conversation, error){
	"delta": func(ctx context.Context, b *bench) (conversation, error) {
		stream, err := b.client.DeltaAggregatedResources(ctx)
		return &delta{stream: stream}, err
	},
	"state of the world": func(ctx context.Context, b *bench) (conversation, error) {
		stream, err := b.client.StreamAggregatedResources(ctx)
		return &world{stream: stream, names: make(map[string][]string), accepted: make(map[string]string)}, err
	},
}

type delta struct {
	stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
	met    bool
}

func (d *delta) subscribe(typeURL string, names ...string) error {
	r := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: names}
	if !d.met {
		r.Node, d.met = node, true
	}
	return d.stream.Send(r)
}

func (d *delta) answer(r response, refusal string) error {
	request := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: r.typeURL, ResponseNonce: r.nonce}
	if refusal != "" {
		request.ErrorDetail = &status.Status{Code: int32(codes.InvalidArgument), Message: refusal}
	}
	return d.stream.Send(request)
}

func (d *delta) receive() (response, error) {
	m, err := d.stream.Recv()
	if err != nil {
		return response{}, err
	}
	r := response{typeURL: m.GetTypeUrl(), version: m.GetSystemVersionInfo(), nonce: m.GetNonce(), resources: make(map[string]*anypb.Any)}
	for _, resource := range m.GetResources() {
		r.resources[resource.GetName()] = resource.GetResource()
	}
	return r, nil
}

type world struct {
	stream   discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient
	met      bool
	names    map[string][]string // by type
	accepted map[string]string   // versions, by type
}

func (w *world) subscribe(typeURL string, names ...string) error {
	w.names[typeURL] = names
	r := &discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: names}
	if !w.met {
		r.Node, w.met = node, true
	}
	return w.stream.Send(r)
}

func (w *world) answer(r response, refusal string) error {
	request := &discoveryv3.DiscoveryRequest{TypeUrl: r.typeURL, ResponseNonce: r.nonce, ResourceNames: w.names[r.typeURL]}
	if refusal != "" {
		request.ErrorDetail = &status.Status{Code: int32(codes.InvalidArgument), Message: refusal}
	} else {
		w.accepted[r.typeURL] = r.version
	}
	request.VersionInfo = w.accepted[r.typeURL]
	return w.stream.Send(request)
}

func (w *world) receive() (response, error) {
	m, err := w.stream.Recv()
	if err != nil {
		return response{}, err
	}
	r := response{typeURL: m.GetTypeUrl(), version: m.GetVersionInfo(), nonce: m.GetNonce(), resources: make(map[string]*anypb.Any)}
	for i, packed := range m.GetResources() {
		resource, err := packed.UnmarshalNew()
		if err != nil {
			return response{}, err
		}
		name := strconv.Itoa(i)
		switch resource := resource.(type) {
		case interface{ GetName() string }:
			name = resource.GetName()
		case interface{ GetClusterName() string }:
			name = resource.GetClusterName()
		}
		r.resources[name] = packed
	}
	return r, nil
}

// A talker is a conversation that fails its test.
type talker struct {
	t *testing.T
	conversation
}

func (b *bench) talk(t *testing.T, protocol string) *talker {
	t.Helper()
	c, err := protocols[protocol](envoytest.Within(t), b)
	if err != nil {
		t.Fatal(err)
	}
	return &talker{t: t, conversation: c}
}

func (c *talker) ask(typeURL string, names ...string) {
	c.t.Helper()
	if err := c.subscribe(typeURL, names...); err != nil {
		c.t.Fatal(err)
	}
}

// next returns the next response, which must be of that type.
func (c *talker) next(typeURL string) response {
	c.t.Helper()
	r, err := c.receive()
	if err != nil {
		c.t.Fatal(err)
	}
	if r.typeURL != typeURL {
		c.t.Fatalf("received a response of type %s, want %s", r.typeURL, typeURL)
	}
	return r
}

func (c *talker) ack(r response) {
	c.t.Helper()
	if err := c.answer(r, ""); err != nil {
		c.t.Fatal(err)
	}
}

func (c *talker) nack(r response, text string) {
	c.t.Helper()
	if err := c.answer(r, text); err != nil {
		c.t.Fatal(err)
	}
}

// subscriptions is what an Envoy asks for, in the order in which it learns of it.
var subscriptions = []struct {
	typeURL string
	names   []string
}{
	{resource.ClusterType, nil},
	{resource.EndpointType, []string{"weir_ratelimit", "upstream"}},
	{resource.ListenerType, nil},
	{resource.RouteType, []string{envoy.RouteName}},
	{resource.ExtensionConfigType, []string{envoy.FilterName}},
}

func byName(r *envoy.Resources, typeURL string) map[string]proto.Message {
	all := make(map[string]proto.Message)
	switch typeURL {
	case resource.ClusterType:
		for _, m := range r.Clusters {
			all[m.GetName()] = m
		}
	case resource.EndpointType:
		for _, m := range r.Endpoints {
			all[m.GetClusterName()] = m
		}
	case resource.ListenerType:
		for _, m := range r.Listeners {
			all[m.GetName()] = m
		}
	case resource.RouteType:
		for _, m := range r.Routes {
			all[m.GetName()] = m
		}
	case resource.ExtensionConfigType:
		for _, m := range r.Extensions {
			all[m.GetName()] = m
		}
	}
	return all
}

// follow asks for everything and accepts it.
func (c *talker) follow() map[string]response {
	c.t.Helper()
	all := make(map[string]response)
	for _, s := range subscriptions {
		c.ask(s.typeURL, s.names...)
		r := c.next(s.typeURL)
		c.ack(r)
		all[s.typeURL] = r
	}
	return all
}

func TestServesEverything(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			resources := sample(t, "1")
			b.publish(t, resources)
			want := make(map[string]map[string]proto.Message)
			for _, s := range subscriptions {
				want[s.typeURL] = maps.Collect(func(yield func(string, proto.Message) bool) {
					for name, m := range byName(resources, s.typeURL) {
						yield(name, proto.Clone(m))
					}
				})
			}
			// What was published is the server's own.
			resources.Routes[0].VirtualHosts = nil

			for typeURL, r := range b.talk(t, protocol).follow() {
				got := make(map[string]proto.Message)
				for name, packed := range r.resources {
					m, err := packed.UnmarshalNew()
					if err != nil {
						t.Fatal(err)
					}
					got[name] = m
				}
				if diff := cmp.Diff(want[typeURL], got, protocmp.Transform()); diff != "" {
					t.Errorf("%s (-want +got):\n%s", typeURL, diff)
				}
			}
		})
	}
}

// A client that comes first waits for what is published first.
func TestWaitsForThePublication(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			c := b.talk(t, protocol)
			c.ask(resource.ExtensionConfigType, envoy.FilterName)
			b.waitFor(t, func(nodes []xds.Node) bool { return len(nodes) == 1 })
			b.publish(t, sample(t, "1"))
			if r := c.next(resource.ExtensionConfigType); len(r.resources) != 1 {
				t.Errorf("received %d resources, want 1", len(r.resources))
			}
		})
	}
}

// Only what has changed is sent, to whoever has the rest.
func TestUnchangedIsNotResent(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.publish(t, sample(t, "1"))
			c := b.talk(t, protocol)
			first := c.follow()
			b.acked(t, first)

			b.publish(t, sample(t, "1")) // the same
			b.publish(t, sample(t, "2")) // another filter configuration
			second := c.next(resource.ExtensionConfigType)
			if old := first[resource.ExtensionConfigType]; second.version == old.version {
				t.Errorf("the version of changed content is still %q", old.version)
			}
			c.ack(second)

			changed := sample(t, "2")
			changed.Routes[0].VirtualHosts[0].Routes[0].Name = "renamed"
			b.publish(t, changed)
			c.next(resource.RouteType)
		})
	}
}

// What a client has refused it is not sent again, and it is sent what comes next.
func TestRefusedIsNotResent(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.publish(t, sample(t, "1"))
			c := b.talk(t, protocol)
			accepted := c.follow()
			b.acked(t, accepted)

			b.publish(t, sample(t, "2"))
			refused := c.next(resource.ExtensionConfigType)
			c.nack(refused, "no such header\nin any request")
			nodes := b.waitFor(t, func(nodes []xds.Node) bool {
				return nodes[0].Types[resource.ExtensionConfigType].Nack != nil
			})
			state := nodes[0].Types[resource.ExtensionConfigType]
			if state.Nack.Version != refused.version || state.Nack.Detail != "no such header\nin any request" || state.Nack.At.IsZero() {
				t.Errorf("Nack = %+v, want version %q and the client's words", state.Nack, refused.version)
			}
			if want := accepted[resource.ExtensionConfigType].version; state.Acked != want || state.Sent != refused.version {
				t.Errorf("sent %q, accepted %q; want %q, %q", state.Sent, state.Acked, refused.version, want)
			}
			if log := b.log.String(); !strings.Contains(log, `level=WARN msg="envoy refused a configuration" node=gateway-1`) ||
				!strings.Contains(log, `detail="no such header\nin any request"`) {
				t.Errorf("the refusal is not in the log:\n%s", log)
			}

			b.publish(t, sample(t, "2")) // the same once more
			b.publish(t, sample(t, "3"))
			next := c.next(resource.ExtensionConfigType)
			if next.version == refused.version {
				t.Fatal("what was refused was sent again")
			}
			c.ack(next)
			b.waitFor(t, func(nodes []xds.Node) bool {
				state := nodes[0].Types[resource.ExtensionConfigType]
				return state.Acked == next.version && state.Nack == nil
			})
		})
	}
}

func TestNodes(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.publish(t, sample(t, "1"))
			if got := b.server.Nodes(); len(got) != 0 {
				t.Errorf("Nodes = %v before any has come", got)
			}

			ctx, cancel := context.WithCancel(envoytest.Within(t))
			conversation, err := protocols[protocol](ctx, b)
			if err != nil {
				t.Fatal(err)
			}
			c := &talker{t: t, conversation: conversation}
			versions := c.follow()
			nodes := b.acked(t, versions)
			got := nodes[0]
			if got.ID != "gateway-1" || got.Cluster != "edge" || got.Version != "1.40.0" ||
				got.Address == "" || got.Delta != (protocol == "delta") || got.Since.IsZero() {
				t.Errorf("Nodes = %+v", got)
			}

			cancel()
			b.waitFor(t, func(nodes []xds.Node) bool { return len(nodes) == 0 })
			for _, want := range []string{"envoy connected", "envoy accepted", "envoy disconnected"} {
				if !strings.Contains(b.log.String(), want) {
					t.Errorf("%q is not in the log:\n%s", want, b.log.String())
				}
			}
		})
	}
}

// acked waits until the one client has accepted those.
func (b *bench) acked(t *testing.T, responses map[string]response) []xds.Node {
	t.Helper()
	return b.waitFor(t, func(nodes []xds.Node) bool {
		for typeURL, r := range responses {
			if nodes[0].Types[typeURL].Acked != r.version {
				return false
			}
		}
		return true
	})
}

// waitFor returns the nodes as soon as they are as ready says.
func (b *bench) waitFor(t *testing.T, ready func([]xds.Node) bool) []xds.Node {
	t.Helper()
	ctx := envoytest.Within(t)
	for {
		nodes := b.server.Nodes()
		if ready(nodes) {
			return nodes
		}
		select {
		case <-ctx.Done():
			t.Fatalf("the nodes did not get there: %+v", nodes)
		case <-time.After(time.Millisecond):
		}
	}
}

// A hostile client gets an error, and the others don't notice.
func TestHostileRequests(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.publish(t, sample(t, "1"))
			good := b.talk(t, protocol)
			good.follow()

			many := make([]string, 10_001)
			for i := range many {
				many[i] = strconv.Itoa(i)
			}
			for _, tt := range []struct {
				name    string
				typeURL string
				names   []string
				want    codes.Code
			}{
				{"unknown type", "type.googleapis.com/x", nil, codes.InvalidArgument},
				{"no type", "", nil, codes.InvalidArgument},
				{"too many names", resource.EndpointType, many, codes.ResourceExhausted},
			} {
				c := b.talk(t, protocol)
				c.ask(tt.typeURL, tt.names...)
				if _, err := c.receive(); grpcstatus.Code(err) != tt.want {
					t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
				}
			}

			b.publish(t, sample(t, "2"))
			good.next(resource.ExtensionConfigType)
		})
	}
}

// Secrets are served like all else.
func TestServesSecrets(t *testing.T) {
	t.Parallel()
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.publish(t, secure(t))
			c := b.talk(t, protocol)
			c.ask(resource.SecretType, "weir_service_ca")
			if r := c.next(resource.SecretType); len(r.resources) != 1 {
				t.Errorf("sent %v, want the secret", r)
			}
		})
	}
}

func TestPublishRefuses(t *testing.T) {
	t.Parallel()

	typedStruct := pack(t, &xdstypev3.TypedStruct{TypeUrl: "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm"})
	plainStruct := pack(t, &structpb.Struct{})
	for _, tt := range []struct {
		name  string
		spoil func(*envoy.Resources)
		want  string
	}{
		{"an extension without its listener", func(r *envoy.Resources) { r.Listeners = nil; r.Routes = nil }, `"weir"`},
		{"a listener without its extension", func(r *envoy.Resources) { r.Extensions = nil }, `"weir"`},
		{"a listener without its routes", func(r *envoy.Resources) { r.Routes = nil }, "RouteConfiguration"},
		{"a cluster without its endpoints", func(r *envoy.Resources) { r.Endpoints = r.Endpoints[1:] }, "ClusterLoadAssignment"},
		{"a cluster without its secret", func(r *envoy.Resources) { *r = *secure(t); r.Secrets = nil }, `the secret "weir_service_ca" is to be discovered`},
		{"a secret of nobody's", func(r *envoy.Resources) {
			r.Secrets = append(r.Secrets, &tlsv3.Secret{Name: "stray"})
		}, `nothing discovers the secret "stray"`},
		{"two of a name", func(r *envoy.Resources) { r.Clusters = append(r.Clusters, r.Clusters[0]) }, `clusters: two have the name "weir_ratelimit"`},
		{"one without a name", func(r *envoy.Resources) { r.Routes = append(r.Routes, &routev3.RouteConfiguration{}) }, "routes: one has no name"},
		{"an unknown type", func(r *envoy.Resources) {
			r.Extensions[0].TypedConfig = &anypb.Any{TypeUrl: "type.googleapis.com/x.Y"}
		}, `"type.googleapis.com/x.Y"`},
		{"a typed struct", func(r *envoy.Resources) {
			r.Extensions[0].TypedConfig = typedStruct
		}, "TypedStruct"},
		{"a struct", func(r *envoy.Resources) { r.Extensions[0].TypedConfig = plainStruct }, "Struct"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			r := sample(t, "1")
			tt.spoil(r)
			if err := b.server.Publish(t.Context(), r); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Publish = %v, want an error with %q", err, tt.want)
			}
		})
	}

	t.Run("nothing", func(t *testing.T) {
		t.Parallel()
		if err := setup(t).server.Publish(t.Context(), nil); err == nil {
			t.Error("Publish(nil) is no error")
		}
	})
	t.Run("an ended context", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := setup(t).server.Publish(ctx, sample(t, "1")); !errors.Is(err, context.Canceled) {
			t.Errorf("Publish = %v, want Canceled", err)
		}
	})
}

// Envoy acknowledges an update to code that it would have to fetch, doesn't fetch
// it, and passes all traffic. No client may ever be sent one.
func TestRemoteCodeIsNeverSent(t *testing.T) {
	t.Parallel()

	remote := &corev3.AsyncDataSource{Specifier: &corev3.AsyncDataSource_Remote{Remote: &corev3.RemoteDataSource{
		HttpUri: &corev3.HttpUri{Uri: "http://modules/filter.wasm"}, Sha256: strings.Repeat("0", 64),
	}}}
	inFilter := func(r *envoy.Resources, wasm *anypb.Any) { r.Extensions[0].TypedConfig = wasm }
	for _, tt := range []struct {
		name  string
		code  *corev3.AsyncDataSource
		nack  bool
		place func(*envoy.Resources, *anypb.Any)
	}{
		{"remote", remote, false, inFilter},
		{"remote, refused on a miss", remote, true, inFilter},
		{"no code", nil, false, inFilter},
		{"in a route", remote, false, func(r *envoy.Resources, wasm *anypb.Any) {
			r.Routes[0].VirtualHosts[0].Routes[0].TypedPerFilterConfig = map[string]*anypb.Any{"weir": wasm}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			b := setup(t)
			b.publish(t, sample(t, "1"))
			c := b.talk(t, "delta")
			c.follow()

			r := sample(t, "2")
			wasm := new(wasmfilterv3.Wasm)
			if err := r.Extensions[0].GetTypedConfig().UnmarshalTo(wasm); err != nil {
				t.Fatal(err)
			}
			wasm.GetConfig().GetVmConfig().Code = tt.code
			wasm.GetConfig().GetVmConfig().NackOnCodeCacheMiss = tt.nack
			tt.place(r, pack(t, wasm))
			if err := b.server.Publish(t.Context(), r); !errors.Is(err, xds.ErrRemoteCode) {
				t.Errorf("Publish = %v, want ErrRemoteCode", err)
			}

			// Nothing of it was sent: the next response is of the next publication.
			good := sample(t, "3")
			b.publish(t, good)
			got := c.next(resource.ExtensionConfigType).resources["weir"]
			if diff := cmp.Diff(pack(t, good.Extensions[0]), got, protocmp.Transform()); diff != "" {
				t.Errorf("the next response (-want +got):\n%s", diff)
			}
		})
	}
}

func pack(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	packed, err := anypb.New(m)
	if err != nil {
		t.Fatal(err)
	}
	return packed
}

// Clients come, go and refuse while configurations are published; each one that
// stays ends on the last.
func TestConcurrency(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.publish(t, sample(t, "first"))
	const publications = 50
	last := sample(t, strconv.Itoa(publications-1))
	want := pack(t, last.Extensions[0])

	ctx := envoytest.Within(t)
	var clients sync.WaitGroup
	failures := make(chan error, 100)
	for i := range 12 {
		open := protocols[slices.Sorted(maps.Keys(protocols))[i%2]]
		clients.Go(func() {
			leaves, refuses := i%3 == 0, i%4 == 0
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			c, err := open(ctx, b)
			if err == nil {
				err = c.subscribe(resource.ExtensionConfigType, envoy.FilterName)
			}
			for n := 0; err == nil; n++ {
				var r response
				if r, err = c.receive(); err != nil {
					break
				}
				if proto.Equal(r.resources[envoy.FilterName], want) || leaves && n == 3 {
					return
				}
				refusal := ""
				if refuses && n%2 == 0 {
					refusal = "not this one"
				}
				err = c.answer(r, refusal)
			}
			failures <- err
		})
	}
	resources := make([]*envoy.Resources, publications)
	for i := range resources {
		resources[i] = sample(t, strconv.Itoa(i))
	}
	for _, r := range resources {
		b.publish(t, r)
	}
	clients.Wait()
	close(failures)
	for err := range failures {
		t.Error(err)
	}
	b.waitFor(t, func(nodes []xds.Node) bool { return len(nodes) == 0 })
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
