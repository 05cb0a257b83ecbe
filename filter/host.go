package filter

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"
)

// host is what the filter asks of Envoy. Each method acts on the stream or plugin
// whose callback is running. [sdk] is the real one.
type host interface {
	// configuration returns the plugin's configuration.
	configuration() ([]byte, error)
	// defineCounter returns the number by which a counter is counted, defineGauge that
	// by which a gauge is set. Both panic if the host is out of them.
	defineCounter(name string) uint32
	count(counter uint32)
	defineGauge(name string) uint32
	setGauge(gauge uint32, value uint64)
	// now is the time of day.
	now() time.Time
	logDebug(text string)
	logWarn(text string)
	logError(text string)

	// requestHeaders returns all pairs, pseudo-headers too, names in lower case.
	requestHeaders() ([][2]string, error)
	// setRequestHeaders and setResponseHeaders put headers in place of all that have
	// their names; a name that comes twice is there twice.
	setRequestHeaders(headers [][2]string) error
	setResponseHeaders(headers [][2]string) error
	// removeRequestHeader removes all headers of a name.
	removeRequestHeader(name string) error
	// requestBody returns bytes of the chunk whose callback is running.
	requestBody(start, size int) ([]byte, error)
	// property returns a property of the request, connection or route, and whether
	// there is one.
	property(path []string) (value []byte, found bool, err error)
	// setState sets what access logs can write as FILTER_STATE(wasm.<name>).
	setState(name, value string) error
	// resume lets a paused request go on.
	resume() error
	// respond answers the client. grpcStatus is for gRPC clients only.
	respond(status uint32, headers [][2]string, body []byte, grpcStatus int32) error

	// setTick has the plugin called back every so often; 0 is never.
	setTick(milliseconds uint32) error
	// pluginDone ends the plugin once it said that it was not done.
	pluginDone()

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
func (sdk) defineGauge(name string) uint32   { return uint32(proxywasm.DefineGaugeMetric(name)) }
func (sdk) now() time.Time                   { return time.Now() } //nolint:forbidigo // this is the clock that the filter is given
func (sdk) logDebug(text string)             { proxywasm.LogDebug(text) }
func (sdk) logWarn(text string)              { proxywasm.LogWarn(text) }
func (sdk) logError(text string)             { proxywasm.LogError(text) }

// setGauge goes by way of a histogram, the one metric to which the SDK lets a value be
// recorded. For the host, which looks at the number, it is the same.
func (sdk) setGauge(gauge uint32, value uint64) { proxywasm.MetricHistogram(gauge).Record(value) }

func (sdk) requestHeaders() ([][2]string, error) { return proxywasm.GetHttpRequestHeaders() }

func (sdk) setRequestHeaders(headers [][2]string) error {
	return set(headers, proxywasm.RemoveHttpRequestHeader, proxywasm.AddHttpRequestHeader)
}

func (sdk) setResponseHeaders(headers [][2]string) error {
	return set(headers, proxywasm.RemoveHttpResponseHeader, proxywasm.AddHttpResponseHeader)
}

func (sdk) removeRequestHeader(name string) error {
	return ignoreAbsent(proxywasm.RemoveHttpRequestHeader(name))
}

func ignoreAbsent(err error) error {
	if errors.Is(err, types.ErrorStatusNotFound) {
		return nil
	}
	return err
}

// set removes all the names before it adds any pair. The SDK's replacing functions
// touch only the first of several headers, so a client could keep its own.
func set(headers [][2]string, remove func(string) error, add func(name, value string) error) error {
	for _, h := range headers {
		if err := ignoreAbsent(remove(h[0])); err != nil {
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

func (sdk) requestBody(start, size int) ([]byte, error) {
	return proxywasm.GetHttpRequestBody(start, size)
}

var errProperty = errors.New("can't be read from Envoy")

func (sdk) property(path []string) (value []byte, found bool, err error) {
	value, err = proxywasm.GetProperty(path)
	switch {
	case errors.Is(err, types.ErrorStatusNotFound):
		return nil, false, nil
	case err != nil: // such as for a message, which has no value of its own
		return nil, false, errProperty
	}
	return value, true, nil
}

func (sdk) setState(name, value string) error {
	if value == "" {
		return nil
	}
	return proxywasm.SetProperty([]string{name}, []byte(value))
}

func (sdk) setTick(milliseconds uint32) error {
	return proxywasm.SetTickPeriodMilliSeconds(milliseconds)
}

func (sdk) pluginDone() { proxywasm.PluginDone() }

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

// readAnswer reads the service's answer to a call, within its done.
func readAnswer(h host, headers, size, trailers int) (answer, error) {
	var (
		r   reply
		err error
	)
	if headers > 0 {
		if r.headers, err = h.answerHeaders(); err != nil {
			return answer{}, fmt.Errorf("reading the answer's headers: %w", err)
		}
	}
	if size > 0 {
		if r.body, err = h.answerBody(size); err != nil {
			return answer{}, fmt.Errorf("reading the answer's body: %w", err)
		}
	}
	if trailers > 0 {
		if r.trailers, err = h.answerTrailers(); err != nil {
			return answer{}, fmt.Errorf("reading the answer's trailers: %w", err)
		}
	}
	return r.parse()
}
