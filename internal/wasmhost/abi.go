package wasmhost

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

const allocateExport = "proxy_on_memory_allocate"

// A status is the result of a host function.
type status = uint32

const (
	statusOK              status = 0
	statusNotFound        status = 1
	statusBadArgument     status = 2
	statusCASMismatch     status = 8
	statusInternalFailure status = 10
	statusUnimplemented   status = 12
)

// Numbers of the ABI.
const (
	bufferRequestBody  = 0
	bufferResponseBody = 1
	bufferCallBody     = 4
	bufferVMConfig     = 6
	bufferPluginConfig = 7

	mapRequestHeaders   = 0
	mapRequestTrailers  = 1
	mapResponseHeaders  = 2
	mapResponseTrailers = 3
	mapCallHeaders      = 6
	mapCallTrailers     = 7

	streamRequest  = 0
	streamResponse = 1
)

// guest is the memory of the VM that called a host function.
type guest struct {
	*VM
	ctx context.Context //nolint:containedctx // lives for one host call, which it came with
	mod api.Module
}

func guestOf(ctx context.Context, mod api.Module) guest {
	v, _ := ctx.Value(vmKey{}).(*VM)
	return guest{v, ctx, mod}
}

// read copies bytes out of the guest.
func (g guest) read(ptr, size uint32) ([]byte, bool) {
	b, ok := g.mod.Memory().Read(ptr, size)
	return slices.Clone(b), ok
}

// give copies bytes into memory that the guest allocates and tells it where they are.
func (g guest) give(b []byte, ptrOut, sizeOut uint32) status {
	var ptr uint32
	// The Go SDK's allocator panics when asked for nothing.
	if len(b) > 0 {
		results, err := g.mod.ExportedFunction(allocateExport).Call(g.ctx, u64(len(b)))
		if err != nil {
			return statusInternalFailure
		}
		ptr = u32(results[0])
	}
	m := g.mod.Memory()
	if !m.Write(ptr, b) || !m.WriteUint32Le(ptrOut, ptr) || !m.WriteUint32Le(sizeOut, u32(u64(len(b)))) {
		return statusBadArgument
	}
	return statusOK
}

// stream is the one that host functions act on.
func (g guest) stream() *Stream { return g.streams[g.effective] }

// headers returns a map that the guest may see now; nil if there is none.
func (g guest) headers(kind uint32) *[][2]string {
	if g.answer != nil {
		switch kind {
		case mapCallHeaders:
			return &g.answer.Headers
		case mapCallTrailers:
			return &g.answer.Trailers
		}
	}
	s := g.stream()
	if s == nil {
		return nil
	}
	var pairs *[][2]string
	switch kind {
	case mapRequestHeaders:
		pairs = &s.request.headers
	case mapRequestTrailers:
		pairs = &s.request.trailers
	case mapResponseHeaders:
		pairs = &s.response.headers
	case mapResponseTrailers:
		pairs = &s.response.trailers
	}
	if pairs == nil || *pairs == nil {
		return nil
	}
	return pairs
}

// buffer returns bytes that the guest may see now; nil if there are none.
func (g guest) buffer(kind uint32) *[]byte {
	switch {
	case kind == bufferVMConfig:
		return &g.cfg.Configuration
	case kind == bufferPluginConfig:
		return &g.config
	case kind == bufferCallBody && g.answer != nil:
		return &g.answer.Body
	}
	if s := g.stream(); s != nil {
		switch kind {
		case bufferRequestBody:
			return &s.request.body
		case bufferResponseBody:
			return &s.response.body
		}
	}
	return nil
}

// exportABI gives a runtime the functions that proxy-wasm modules import.
func exportABI(ctx context.Context, r wazero.Runtime) error {
	b := r.NewHostModuleBuilder("env")
	for name, f := range map[string]any{
		"proxy_log":                          proxyLog,
		"proxy_get_buffer_bytes":             getBuffer,
		"proxy_set_buffer_bytes":             setBuffer,
		"proxy_get_header_map_pairs":         getPairs,
		"proxy_set_header_map_pairs":         setPairs,
		"proxy_get_header_map_value":         getValue,
		"proxy_add_header_map_value":         addValue,
		"proxy_replace_header_map_value":     replaceValue,
		"proxy_remove_header_map_value":      removeValue,
		"proxy_get_property":                 getProperty,
		"proxy_set_property":                 setProperty,
		"proxy_get_shared_data":              getShared,
		"proxy_set_shared_data":              setShared,
		"proxy_http_call":                    httpCall,
		"proxy_send_local_response":          sendLocalResponse,
		"proxy_continue_stream":              continueStream,
		"proxy_set_effective_context":        setEffectiveContext,
		"proxy_set_tick_period_milliseconds": setTickPeriod,
		"proxy_done":                         done,
		"proxy_define_metric":                defineMetric,
		"proxy_increment_metric":             incrementMetric,
		"proxy_record_metric":                recordMetric,
		"proxy_get_metric":                   getMetric,

		"proxy_close_stream":          func(uint32) status { return statusUnimplemented },
		"proxy_call_foreign_function": func(_, _, _, _, _, _ uint32) status { return statusUnimplemented },
		"proxy_register_shared_queue": func(_, _, _ uint32) status { return statusUnimplemented },
		"proxy_resolve_shared_queue":  func(_, _, _, _, _ uint32) status { return statusUnimplemented },
		"proxy_enqueue_shared_queue":  func(_, _, _ uint32) status { return statusUnimplemented },
		"proxy_dequeue_shared_queue":  func(_, _, _ uint32) status { return statusUnimplemented },
	} {
		b.NewFunctionBuilder().WithFunc(f).Export(name)
	}
	_, err := b.Instantiate(ctx)
	return err
}

func proxyLog(ctx context.Context, mod api.Module, level, ptr, size uint32) status {
	g := guestOf(ctx, mod)
	text, ok := g.read(ptr, size)
	if !ok {
		return statusBadArgument
	}
	if len(g.logs) >= maxLogs {
		g.logs = slices.Delete(g.logs, 0, maxLogs/2)
	}
	v := g.VM
	v.logs = append(v.logs, Log{LogLevel(level), string(text)})
	return statusOK
}

func getBuffer(ctx context.Context, mod api.Module, kind, start, size, ptrOut, sizeOut uint32) status {
	g := guestOf(ctx, mod)
	b := g.buffer(kind)
	if b == nil {
		return statusNotFound
	}
	from := min(uint64(start), u64(len(*b)))
	to := min(from+uint64(size), u64(len(*b)))
	return g.give((*b)[from:to], ptrOut, sizeOut)
}

// setBuffer replaces a part of a body. Nothing else can be changed.
func setBuffer(ctx context.Context, mod api.Module, kind, start, size, ptr, length uint32) status {
	g := guestOf(ctx, mod)
	b := g.buffer(kind)
	if b == nil || kind != bufferRequestBody && kind != bufferResponseBody {
		return statusBadArgument
	}
	data, ok := g.read(ptr, length)
	if !ok {
		return statusBadArgument
	}
	from := min(uint64(start), u64(len(*b)))
	to := min(from+uint64(size), u64(len(*b)))
	*b = slices.Concat((*b)[:from], data, (*b)[to:])
	return statusOK
}

func getPairs(ctx context.Context, mod api.Module, kind, ptrOut, sizeOut uint32) status {
	g := guestOf(ctx, mod)
	pairs := g.headers(kind)
	if pairs == nil {
		return statusNotFound
	}
	return g.give(encodePairs(*pairs), ptrOut, sizeOut)
}

func setPairs(ctx context.Context, mod api.Module, kind, ptr, size uint32) status {
	g := guestOf(ctx, mod)
	pairs := g.headers(kind)
	data, ok := g.read(ptr, size)
	if pairs == nil || !ok {
		return statusBadArgument
	}
	decoded, ok := decodePairs(data)
	if !ok {
		return statusBadArgument
	}
	*pairs = lower(decoded)
	return statusOK
}

func getValue(ctx context.Context, mod api.Module, kind, keyPtr, keySize, ptrOut, sizeOut uint32) status {
	g := guestOf(ctx, mod)
	key, ok := g.read(keyPtr, keySize)
	if !ok {
		return statusBadArgument
	}
	pairs := g.headers(kind)
	if pairs == nil {
		return statusNotFound
	}
	i := find(*pairs, string(key))
	if i < 0 {
		return statusNotFound
	}
	return g.give([]byte((*pairs)[i][1]), ptrOut, sizeOut)
}

func addValue(ctx context.Context, mod api.Module, kind, keyPtr, keySize, valuePtr, valueSize uint32) status {
	return guestOf(ctx, mod).change(kind, keyPtr, keySize, valuePtr, valueSize, func(pairs [][2]string, pair [2]string) [][2]string {
		return append(pairs, pair)
	})
}

func replaceValue(ctx context.Context, mod api.Module, kind, keyPtr, keySize, valuePtr, valueSize uint32) status {
	return guestOf(ctx, mod).change(kind, keyPtr, keySize, valuePtr, valueSize, func(pairs [][2]string, pair [2]string) [][2]string {
		if i := find(pairs, pair[0]); i >= 0 {
			pairs[i] = pair
			return pairs
		}
		return append(pairs, pair)
	})
}

func removeValue(ctx context.Context, mod api.Module, kind, keyPtr, keySize uint32) status {
	return guestOf(ctx, mod).change(kind, keyPtr, keySize, 0, 0, func(pairs [][2]string, pair [2]string) [][2]string {
		return slices.DeleteFunc(pairs, func(p [2]string) bool { return p[0] == pair[0] })
	})
}

func (g guest) change(kind, keyPtr, keySize, valuePtr, valueSize uint32, f func([][2]string, [2]string) [][2]string) status {
	key, ok := g.read(keyPtr, keySize)
	value, ok2 := g.read(valuePtr, valueSize)
	pairs := g.headers(kind)
	if !ok || !ok2 || pairs == nil {
		return statusBadArgument
	}
	*pairs = f(*pairs, [2]string{strings.ToLower(string(key)), string(value)})
	return statusOK
}

func find(pairs [][2]string, key string) int {
	key = strings.ToLower(key)
	return slices.IndexFunc(pairs, func(p [2]string) bool { return p[0] == key })
}

func getProperty(ctx context.Context, mod api.Module, ptr, size, ptrOut, sizeOut uint32) status {
	g := guestOf(ctx, mod)
	path, ok := g.read(ptr, size)
	if !ok {
		return statusBadArgument
	}
	if s := g.stream(); s != nil {
		if value, ok := s.properties[strings.TrimSuffix(string(path), "\x00")]; ok {
			return g.give(value, ptrOut, sizeOut)
		}
	}
	return statusNotFound
}

// setProperty sets filter state, whose names have a prefix in Envoy.
func setProperty(ctx context.Context, mod api.Module, ptr, size, valuePtr, valueSize uint32) status {
	g := guestOf(ctx, mod)
	path, ok := g.read(ptr, size)
	value, ok2 := g.read(valuePtr, valueSize)
	if !ok || !ok2 {
		return statusBadArgument
	}
	s := g.stream()
	if s == nil {
		return statusNotFound
	}
	s.state["wasm."+strings.TrimSuffix(string(path), "\x00")] = value
	return statusOK
}

// plugin is the plugin of the context that host functions act on.
func (g guest) plugin() *Plugin {
	if s := g.stream(); s != nil {
		return s.plugin
	}
	return g.plugins[g.effective]
}

func setTickPeriod(ctx context.Context, mod api.Module, milliseconds uint32) status {
	p := guestOf(ctx, mod).plugin()
	if p == nil {
		return statusBadArgument
	}
	p.tick = time.Duration(milliseconds) * time.Millisecond
	return statusOK
}

func done(ctx context.Context, mod api.Module) status {
	p := guestOf(ctx, mod).plugin()
	if p == nil {
		return statusBadArgument
	}
	p.done = true
	return statusOK
}

func getShared(ctx context.Context, mod api.Module, keyPtr, keySize, ptrOut, sizeOut, casOut uint32) status {
	g := guestOf(ctx, mod)
	key, ok := g.read(keyPtr, keySize)
	if !ok {
		return statusBadArgument
	}
	value, cas, ok := g.cfg.Shared.Get(string(key))
	if !ok {
		return statusNotFound
	}
	if !mod.Memory().WriteUint32Le(casOut, cas) {
		return statusBadArgument
	}
	return g.give(value, ptrOut, sizeOut)
}

func setShared(ctx context.Context, mod api.Module, keyPtr, keySize, valuePtr, valueSize, cas uint32) status {
	g := guestOf(ctx, mod)
	key, ok := g.read(keyPtr, keySize)
	value, ok2 := g.read(valuePtr, valueSize)
	if !ok || !ok2 {
		return statusBadArgument
	}
	if !g.cfg.Shared.Set(string(key), value, cas) {
		return statusCASMismatch
	}
	return statusOK
}

func httpCall(ctx context.Context, mod api.Module, clusterPtr, clusterSize, headersPtr, headersSize,
	bodyPtr, bodySize, trailersPtr, trailersSize, timeout, idOut uint32,
) status {
	g := guestOf(ctx, mod)
	cluster, ok := g.read(clusterPtr, clusterSize)
	if !ok {
		return statusBadArgument
	}
	headers, ok := g.pairs(headersPtr, headersSize)
	if !ok {
		return statusBadArgument
	}
	body, ok := g.read(bodyPtr, bodySize)
	if !ok {
		return statusBadArgument
	}
	trailers, ok := g.pairs(trailersPtr, trailersSize)
	if !ok {
		return statusBadArgument
	}
	for _, pseudo := range []string{":method", ":path", ":authority"} {
		if find(headers, pseudo) < 0 {
			return statusBadArgument
		}
	}
	p := g.plugin()
	if p == nil {
		return statusBadArgument
	}
	if healthy, known := g.cfg.Clusters[string(cluster)]; g.cfg.Clusters != nil && !healthy {
		if known {
			return statusInternalFailure
		}
		return statusBadArgument
	}
	g.lastCall++
	if !mod.Memory().WriteUint32Le(idOut, g.lastCall) {
		return statusBadArgument
	}
	g.calls[g.lastCall] = &Call{
		Cluster: string(cluster), Headers: headers, Body: body, Trailers: trailers,
		Timeout: time.Duration(timeout) * time.Millisecond, plugin: p, id: g.lastCall,
	}
	return statusOK
}

func sendLocalResponse(ctx context.Context, mod api.Module, code, detailsPtr, detailsSize, bodyPtr, bodySize,
	headersPtr, headersSize, grpcStatus uint32,
) status {
	g := guestOf(ctx, mod)
	_, ok := g.read(detailsPtr, detailsSize)
	body, ok2 := g.read(bodyPtr, bodySize)
	headers, ok3 := g.pairs(headersPtr, headersSize)
	s := g.stream()
	if !ok || !ok2 || !ok3 || s == nil {
		return statusBadArgument
	}
	// A second answer is dropped, as in Envoy.
	if s.local == nil && !s.ended {
		s.local = &LocalResponse{
			Status: int(code), Headers: lower(headers), Body: body,
			GRPCStatus: int(int32(grpcStatus)), //nolint:gosec // the ABI's number is signed
		}
	}
	return statusOK
}

func (g guest) pairs(ptr, size uint32) ([][2]string, bool) {
	b, ok := g.read(ptr, size)
	if !ok {
		return nil, false
	}
	return decodePairs(b)
}

func continueStream(ctx context.Context, mod api.Module, kind uint32) status {
	s := guestOf(ctx, mod).stream()
	switch {
	case s == nil:
		return statusBadArgument
	case kind == streamRequest:
		s.request.resumed = true
	case kind == streamResponse:
		s.response.resumed = true
	default:
		return statusUnimplemented
	}
	return statusOK
}

func setEffectiveContext(ctx context.Context, mod api.Module, id uint32) status {
	g := guestOf(ctx, mod)
	if g.plugins[id] == nil && g.streams[id] == nil {
		return statusBadArgument
	}
	g.effective = id
	return statusOK
}

func defineMetric(ctx context.Context, mod api.Module, _, ptr, size, idOut uint32) status {
	g := guestOf(ctx, mod)
	name, ok := g.read(ptr, size)
	if !ok || !mod.Memory().WriteUint32Le(idOut, g.metrics.define(string(name))) {
		return statusBadArgument
	}
	return statusOK
}

func incrementMetric(ctx context.Context, mod api.Module, id uint32, offset int64) status {
	g := guestOf(ctx, mod)
	name, ok := g.metrics.name(id)
	if !ok {
		return statusNotFound
	}
	g.metrics.values[name] += offset
	return statusOK
}

func recordMetric(ctx context.Context, mod api.Module, id uint32, value uint64) status {
	g := guestOf(ctx, mod)
	name, ok := g.metrics.name(id)
	if !ok {
		return statusNotFound
	}
	g.metrics.values[name] = int64(value) //nolint:gosec // the ABI's numbers are 64 bits of either kind
	return statusOK
}

func getMetric(ctx context.Context, mod api.Module, id, out uint32) status {
	g := guestOf(ctx, mod)
	name, ok := g.metrics.name(id)
	if !ok {
		return statusNotFound
	}
	if !mod.Memory().WriteUint64Le(out, uint64(g.metrics.values[name])) { //nolint:gosec // as above
		return statusBadArgument
	}
	return statusOK
}

// encodePairs writes a map as the ABI does: the number of pairs, the sizes of all, then
// names and values, each with a NUL behind it.
func encodePairs(pairs [][2]string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, u32(u64(len(pairs))))
	for _, p := range pairs {
		b = binary.LittleEndian.AppendUint32(b, u32(u64(len(p[0]))))
		b = binary.LittleEndian.AppendUint32(b, u32(u64(len(p[1]))))
	}
	for _, p := range pairs {
		b = append(b, p[0]...)
		b = append(b, 0)
		b = append(b, p[1]...)
		b = append(b, 0)
	}
	return b
}

// decodePairs reads what encodePairs writes. No bytes at all are no pairs.
func decodePairs(b []byte) ([][2]string, bool) {
	if len(b) == 0 {
		return nil, true
	}
	if len(b) < 4 {
		return nil, false
	}
	n := uint64(binary.LittleEndian.Uint32(b))
	if n > u64(len(b)-4)/8 {
		return nil, false
	}
	sizes, data := b[4:4+8*n], b[4+8*n:]
	pairs := make([][2]string, n)
	for i := range pairs {
		for j := range 2 {
			size := uint64(binary.LittleEndian.Uint32(sizes))
			sizes = sizes[4:]
			if size >= u64(len(data)) || data[size] != 0 {
				return nil, false
			}
			pairs[i][j] = string(data[:size])
			data = data[size+1:]
		}
	}
	return pairs, len(data) == 0
}

// The ABI's numbers have 32 bits, in stack slots of 64: u64 widens a size and u32 takes
// the low half.
func u64(size int) uint64 {
	return uint64(size) //nolint:gosec // a size is not negative
}

func u32(n uint64) uint32 {
	return uint32(n) //nolint:gosec // the low half is meant
}
