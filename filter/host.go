package filter

import (
	"errors"
	"fmt"
	"math"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"
)

// host is what the filter asks of Envoy. Each method acts on the stream or plugin
// whose callback is running. [sdk] is the real one.
type host interface {
	// configuration returns the plugin's configuration.
	configuration() ([]byte, error)
	// defineCounter returns the number by which a counter is counted.
	defineCounter(name string) uint32
	count(counter uint32)
	logWarn(text string)
	logError(text string)

	// requestHeaders returns all pairs, pseudo-headers too, names in lower case.
	requestHeaders() ([][2]string, error)
	// setRequestHeaders and setResponseHeaders put headers in place of all that have
	// their names; a name that comes twice is there twice.
	setRequestHeaders(headers [][2]string) error
	setResponseHeaders(headers [][2]string) error
	// resume lets a paused request go on.
	resume() error
	// respond answers the client. grpcStatus is for gRPC clients only.
	respond(status uint32, headers [][2]string, body []byte, grpcStatus int32) error

	// call sends a request to a cluster. If it returns nil, done is called once,
	// later, unless the stream is gone by then. The timeout is in milliseconds.
	call(cluster string, headers [][2]string, body []byte, timeout uint32, done func(headers, size, trailers int)) error
	// The parts of the answer to a call, within its done.
	answerHeaders() ([][2]string, error)
	answerBody(size int) ([]byte, error)
	answerTrailers() ([][2]string, error)
}

// sdk is the host behind the SDK's functions.
type sdk struct{}

func (sdk) configuration() ([]byte, error) {
	text, err := proxywasm.GetPluginConfiguration()
	if errors.Is(err, types.ErrorStatusNotFound) {
		return nil, errors.New("the plugin has no configuration")
	}
	return text, err
}

func (sdk) defineCounter(name string) uint32 { return uint32(proxywasm.DefineCounterMetric(name)) }
func (sdk) count(counter uint32)             { proxywasm.MetricCounter(counter).Increment(1) }
func (sdk) logWarn(text string)              { proxywasm.LogWarn(text) }
func (sdk) logError(text string)             { proxywasm.LogError(text) }

func (sdk) requestHeaders() ([][2]string, error) { return proxywasm.GetHttpRequestHeaders() }

func (sdk) setRequestHeaders(headers [][2]string) error {
	return set(headers, proxywasm.RemoveHttpRequestHeader, proxywasm.AddHttpRequestHeader)
}

func (sdk) setResponseHeaders(headers [][2]string) error {
	return set(headers, proxywasm.RemoveHttpResponseHeader, proxywasm.AddHttpResponseHeader)
}

// set removes all the names before it adds any pair. The SDK's replacing functions
// touch only the first of several headers, so a client could keep its own.
func set(headers [][2]string, remove func(string) error, add func(name, value string) error) error {
	for _, h := range headers {
		if err := remove(h[0]); err != nil && !errors.Is(err, types.ErrorStatusNotFound) {
			return fmt.Errorf("removing header %q: %w", h[0], err)
		}
	}
	for _, h := range headers {
		if err := add(h[0], h[1]); err != nil {
			return fmt.Errorf("adding header %q: %w", h[0], err)
		}
	}
	return nil
}

func (sdk) resume() error { return proxywasm.ResumeHttpRequest() }

func (sdk) respond(status uint32, headers [][2]string, body []byte, grpcStatus int32) error {
	return proxywasm.SendHttpResponse(status, headers, body, grpcStatus)
}

func (sdk) call(cluster string, headers [][2]string, body []byte, timeout uint32, done func(headers, size, trailers int)) error {
	_, err := proxywasm.DispatchHttpCall(cluster, headers, body, nil, timeout, done)
	return err
}

func (sdk) answerHeaders() ([][2]string, error) { return proxywasm.GetHttpCallResponseHeaders() }

func (sdk) answerBody(size int) ([]byte, error) {
	return proxywasm.GetHttpCallResponseBody(0, min(size, math.MaxInt32))
}

func (sdk) answerTrailers() ([][2]string, error) { return proxywasm.GetHttpCallResponseTrailers() }
