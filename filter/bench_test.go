package filter

import (
	"testing"
	"time"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/internal/wasmhost"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

// benchHost answers at once and allocates nothing itself.
type benchHost struct {
	headers [][2]string
	answer  wasmhost.Answer
	done    func(headers, size, trailers int)
	resumed int
}

func (*benchHost) configuration() ([]byte, error)          { return nil, nil }
func (*benchHost) defineCounter(string) uint32             { return 0 }
func (*benchHost) count(uint32)                            {}
func (*benchHost) defineGauge(string) uint32               { return 0 }
func (*benchHost) setGauge(uint32, uint64)                 {}
func (*benchHost) setTick(uint32) error                    { return nil }
func (*benchHost) pluginDone()                             {}
func (*benchHost) requestBody(int, int) ([]byte, error)    { return nil, nil }
func (*benchHost) property([]string) ([]byte, bool, error) { return nil, false, nil }
func (*benchHost) setState(string, string) error           { return nil }
func (*benchHost) removeRequestHeader(string) error        { return nil }
func (*benchHost) now() time.Time                          { return time.Time{} }
func (*benchHost) logDebug(string)                         {}
func (*benchHost) logWarn(string)                          {}
func (*benchHost) logError(string)                         {}
func (h *benchHost) requestHeaders() ([][2]string, error)  { return h.headers, nil }
func (*benchHost) setRequestHeaders([][2]string) error     { return nil }
func (*benchHost) setResponseHeaders([][2]string) error    { return nil }
func (h *benchHost) resume() error                         { h.resumed++; return nil }

func (*benchHost) respond(uint32, [][2]string, []byte, int32) error { return nil }

func (h *benchHost) call(_ string, _ [][2]string, _ []byte, _ uint32, done func(headers, size, trailers int)) error {
	h.done = done
	return nil
}

func (h *benchHost) answerHeaders() ([][2]string, error)  { return h.answer.Headers, nil }
func (h *benchHost) answerBody(int) ([]byte, error)       { return h.answer.Body, nil }
func (h *benchHost) answerTrailers() ([][2]string, error) { return h.answer.Trailers, nil }

// demoPlugin has the demonstration's configuration, for a request with all its keys.
func demoPlugin(tb testing.TB) (*plugin, *benchHost) {
	tb.Helper()
	cfg, err := config.Parse(pluginConfig(tb, demo))
	if err != nil {
		tb.Fatal(err)
	}
	h := &benchHost{
		headers: post([2]string{"content-length", "1024"}, [2]string{"user-agent", "bench"}, [2]string{"accept", "*/*"},
			[2]string{"x-node-id", node}, [2]string{"x-domain-id", other}, [2]string{"x-consumer", "acme"}),
		answer: okAnswer(tb),
	}
	v := newVM(h)
	p := &plugin{vm: v, host: h, cfg: cfg, counters: v.define(cfg), callHeaders: callHeaders(cfg.Cluster, cfg.Timeout)}
	p.refunds.plugin = p
	return p, h
}

func serve(p *plugin, h *benchHost) {
	s := p.NewHttpContext(0)
	s.OnHttpRequestHeaders(len(h.headers), false)
	h.done(len(h.answer.Headers), len(h.answer.Body), len(h.answer.Trailers))
	s.OnHttpRequestBody(1024, true)
	s.OnHttpResponseHeaders(1, true)
	s.OnHttpStreamDone()
}

// BenchmarkRequest is what the filter itself costs for a request with a call, without
// the SDK and the host.
func BenchmarkRequest(b *testing.B) {
	p, h := demoPlugin(b)
	b.ReportAllocs()
	for b.Loop() {
		serve(p, h)
	}
}

// The stream and its callback are all that a request allocates.
func TestAllocations(t *testing.T) {
	p, h := demoPlugin(t)
	const most = 2
	if got := testing.AllocsPerRun(100, func() { serve(p, h) }); got > most {
		t.Errorf("a request allocates %v times, want %d at most", got, most)
	}
	if h.resumed == 0 {
		t.Error("no request went on")
	}
}

// BenchmarkWasmRequest is the same in the compiled module on wazero, for comparison
// from one change to the next.
func BenchmarkWasmRequest(b *testing.B) {
	vm, err := wasmtest.Compiled(b).NewVM(b.Context(), wasmhost.VMConfig{})
	if err != nil {
		b.Fatal(err)
	}
	p, err := vm.Start(b.Context(), pluginConfig(b, demo))
	if err != nil {
		b.Fatal(err)
	}
	_, h := demoPlugin(b)
	for b.Loop() {
		s, err := p.NewStream(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if _, err := s.RequestHeaders(b.Context(), h.headers, true); err != nil {
			b.Fatal(err)
		}
		if err := p.Calls()[0].Respond(b.Context(), h.answer); err != nil {
			b.Fatal(err)
		}
		if err := s.Done(b.Context()); err != nil || !s.Upstream().Ended {
			b.Fatal(err, s.LocalResponse())
		}
	}
	b.ReportMetric(float64(vm.Memory())/(1<<20), "guest-MiB")
}

func TestModuleSize(t *testing.T) {
	t.Parallel()

	if size := len(wasmtest.Bytes(t)); size > wasmtest.MaxSize {
		t.Errorf("the module has %d bytes, want %d at most", size, wasmtest.MaxSize)
	}
}
