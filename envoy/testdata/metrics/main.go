// Command metrics is a Wasm filter that counts one on each metric of its configuration,
// a name a line.
package main

import (
	"strings"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"
)

func main() {}

func init() { proxywasm.SetVMContext(&vm{}) }

type vm struct{ types.DefaultVMContext }

// NewPluginContext implements [types.VMContext].
func (*vm) NewPluginContext(uint32) types.PluginContext { return &plugin{} }

type plugin struct{ types.DefaultPluginContext }

// OnPluginStart implements [types.PluginContext].
func (*plugin) OnPluginStart(int) types.OnPluginStartStatus {
	names, err := proxywasm.GetPluginConfiguration()
	if err != nil {
		return types.OnPluginStartStatusFailed
	}
	for name := range strings.Lines(string(names)) {
		proxywasm.DefineCounterMetric(strings.TrimSpace(name)).Increment(1)
	}
	return types.OnPluginStartStatusOK
}
