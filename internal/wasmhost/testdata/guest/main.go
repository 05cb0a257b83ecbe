// Command guest is a plugin that does what its configuration and a request's path
// tell it, to try the host.
package main

import (
	"fmt"
	"strings"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"
)

func main() {}

func init() { proxywasm.SetVMContext(&vm{}) }

type vm struct{ types.DefaultVMContext }

func (*vm) NewPluginContext(uint32) types.PluginContext { return &plugin{} }

type plugin struct {
	types.DefaultPluginContext
	ticks uint32
	gauge proxywasm.MetricGauge
}

func (p *plugin) OnPluginStart(int) types.OnPluginStartStatus {
	text, err := proxywasm.GetPluginConfiguration()
	switch {
	case err != nil:
		proxywasm.LogWarn("no configuration: " + err.Error())
	case string(text) == "panic":
		panic("told to")
	case string(text) == "loop":
		for {
		}
	case string(text) == "refuse":
		proxywasm.LogError("not this one")
		return types.OnPluginStartStatusFailed
	case string(text) == "refuse silently":
		return types.OnPluginStartStatusFailed
	}
	p.gauge = proxywasm.DefineGaugeMetric("ticks")
	return types.OnPluginStartStatusOK
}

func (p *plugin) OnTick() { p.gauge.Add(2) }

func (p *plugin) NewHttpContext(uint32) types.HttpContext { return &stream{} }

type stream struct {
	types.DefaultHttpContext
	path  string
	sizes []string
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func (s *stream) OnHttpRequestHeaders(int, bool) types.Action {
	var err error
	s.path, err = proxywasm.GetHttpRequestHeader(":path")
	check(err)
	switch s.path {
	case "/panic":
		panic("told to")
	case "/headers":
		check(proxywasm.AddHttpRequestHeader("X-Added", "1"))
		check(proxywasm.AddHttpRequestHeader("x-added", ""))
		check(proxywasm.RemoveHttpRequestHeader("x-gone"))
		check(proxywasm.ReplaceHttpRequestHeader("x-twice", "new"))
		empty, err := proxywasm.GetHttpRequestHeader("x-empty")
		_, missing := proxywasm.GetHttpRequestHeader("x-missing")
		check(proxywasm.AddHttpRequestHeader("x-seen", fmt.Sprintf("%q %v %v", empty, err, missing)))
	case "/replace":
		check(proxywasm.ReplaceHttpRequestHeaders([][2]string{{":path", "/new"}}))
	case "/property":
		address, err := proxywasm.GetProperty([]string{"source", "address"})
		check(err)
		_, missing := proxywasm.GetProperty([]string{"source"})
		check(proxywasm.AddHttpRequestHeader("x-seen", fmt.Sprintf("%s %v", address, missing)))
	case "/shared":
		_, _, missing := proxywasm.GetSharedData("k")
		created := proxywasm.SetSharedData("k", []byte("1"), 0xffffffff)
		again := proxywasm.SetSharedData("k", []byte("2"), 0xffffffff)
		value, cas, err := proxywasm.GetSharedData("k")
		check(err)
		swapped := proxywasm.SetSharedData("k", append(value, '+'), cas)
		check(proxywasm.AddHttpRequestHeader("x-seen", fmt.Sprintf("%v, %v, %v, %v", missing, created, again, swapped)))
	case "/stop":
		_, err := proxywasm.DispatchHttpCall("c", [][2]string{{":method", "GET"}, {":path", "/"}, {":authority", "c"}}, nil,
			nil, 1000, func(headers, size, trailers int) {
				check(proxywasm.AddHttpRequestHeader("x-answer", fmt.Sprint(headers, size, trailers)))
				check(proxywasm.ResumeHttpRequest())
			})
		check(err)
		return types.Action(4)
	case "/incomplete":
		_, err := proxywasm.DispatchHttpCall("c", [][2]string{{":method", "GET"}}, nil, nil, 1000, func(int, int, int) {})
		check(proxywasm.AddHttpRequestHeader("x-seen", fmt.Sprint(err)))
	case "/local":
		check(proxywasm.SendHttpResponse(418, [][2]string{{"X-Tea", "pot"}}, []byte("short"), 5))
		check(proxywasm.SendHttpResponse(500, nil, nil, 5))
		return types.ActionPause
	case "/hold", "/watermark", "/through":
		return types.ActionPause
	}
	return types.ActionContinue
}

func (s *stream) OnHttpRequestBody(size int, end bool) types.Action {
	body, err := proxywasm.GetHttpRequestBody(0, size)
	if size > 0 {
		check(err)
	} else if err == nil {
		panic("an empty body was read")
	}
	if len(body) != size {
		panic("the body has another size")
	}
	s.sizes = append(s.sizes, fmt.Sprint(size))
	switch {
	case s.path == "/upper":
		check(proxywasm.ReplaceHttpRequestBody([]byte(strings.ToUpper(string(body)))))
	case s.path == "/hold" && end:
		check(proxywasm.AddHttpRequestHeader("x-sizes", strings.Join(s.sizes, " ")))
		check(proxywasm.ResumeHttpRequest())
		return types.ActionPause
	case s.path == "/hold":
		return types.ActionPause
	case s.path == "/watermark" && !end:
		return types.Action(2)
	case s.path == "/watermark":
		check(proxywasm.AddHttpRequestHeader("x-sizes", strings.Join(s.sizes, " ")))
	}
	return types.ActionContinue
}

func (s *stream) OnHttpResponseHeaders(int, bool) types.Action {
	_, err := proxywasm.GetHttpRequestHeaders()
	check(proxywasm.AddHttpResponseHeader("x-request-headers", fmt.Sprint(err)))
	if s.path == "/late" {
		check(proxywasm.SendHttpResponse(502, nil, []byte("late"), -1))
		return types.ActionPause
	}
	return types.ActionContinue
}

func (s *stream) OnHttpStreamDone() {
	path, err := proxywasm.GetHttpRequestHeader(":path")
	proxywasm.LogInfof("done %s %v", path, err)
}
