// Command filter is Weir's proxy-wasm plugin. Envoy loads the module that
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared
//
// makes of it. What it does is in package filter.
package main

import (
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"

	"github.com/weir-dev/weir/filter"
)

// A module built with c-shared is initialised and then only called back: main
// does not run.
func main() {}

func init() { proxywasm.SetVMContext(filter.NewVMContext()) }
