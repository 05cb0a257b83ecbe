package config_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/filter/config"
)

const full = `{
	"timeout": "1.5s",
	"hold_bytes": 524288,
	"rules": [
		{"name": "uploads", "descriptors": [
			{"entries": [{"key": "node", "header": "X-Node-Id", "type": "uuid", "missing": "skip"}], "cost": "body_bytes"},
			{"entries": [
				{"key": "plan", "header": "x-plan", "missing": "default", "default": "free"},
				{"key": "owner", "header": "x-owner", "type": "uuid", "missing": "default", "default": "C9BF9E57-1685-4C89-BAFB-FF5AF830BE8A"}
			]}
		]},
		{"descriptors": [{"entries": [{"key": "consumer", "header": "x-consumer", "type": "string", "missing": "deny"}], "cost": "one"}]}
	]
}`

func header(name string) config.Source { return config.Source{Kind: config.SourceHeader, Name: name} }

func fullBlock() config.Block {
	return config.Block{
		Timeout:   1500 * time.Millisecond,
		HoldBytes: 524288,
		Rules: []config.Rule{
			{Name: "uploads", Descriptors: []config.Descriptor{
				{
					Entries: []config.Entry{{Key: "node", Source: header("x-node-id"), Type: config.TypeUUID, Missing: config.MissingSkip}},
					Cost:    config.CostBodyBytes,
				},
				{Entries: []config.Entry{
					{Key: "plan", Source: header("x-plan"), Missing: config.MissingDefault, Default: "free"},
					{
						Key: "owner", Source: header("x-owner"), Type: config.TypeUUID,
						Missing: config.MissingDefault, Default: "c9bf9e57-1685-4c89-bafb-ff5af830be8a",
					},
				}},
			}},
			{Descriptors: []config.Descriptor{
				{Entries: []config.Entry{{Key: "consumer", Source: header("x-consumer")}}},
			}},
		},
	}
}

func TestParseBlock(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		name, text string
		want       config.Block
	}{
		{"everything", full, fullBlock()},
		{"the defaults", `{"rules": []}`, config.Block{Timeout: 250 * time.Millisecond, HoldBytes: 256 << 10}},
		{
			"the least", `{"timeout": "1ms", "hold_bytes": 1, "rules": []}`,
			config.Block{Timeout: time.Millisecond, HoldBytes: 1},
		},
		{
			"the most", `{"timeout": "60s", "hold_bytes": 16777216, "rules": []}`,
			config.Block{Timeout: time.Minute, HoldBytes: 16 << 20},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			got, err := config.ParseBlock([]byte(tc.text))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("ParseBlock (-want +got):\n%s", diff)
			}
		})
	}
}

// entry wraps the text of an entry in a block.
func entry(text string) string {
	return `{"rules": [{"descriptors": [{"entries": [` + text + `]}]}]}`
}

func TestParseBlockErrors(t *testing.T) {
	t.Parallel()

	const e0 = "rules[0].descriptors[0].entries[0]"
	for _, tc := range []struct {
		name, text string
		want       []string // errors, each a path, a colon and a part of the message
	}{
		{"nothing", ``, []string{"unexpected end of JSON input"}},
		{"half", `{"rules": [`, []string{"unexpected end of JSON input"}},
		{"text after it", `{"rules": []} {}`, []string{"invalid character"}},
		{"not UTF-8", "{\"rules\": [], \"\xff\": 1}", []string{"is not valid UTF-8"}},
		{"no object", `[]`, []string{"is a list, want an object"}},
		{"null", `null`, []string{"is null, want an object"}},
		{"nested", strings.Repeat("[", 40) + strings.Repeat("]", 40), []string{"nested too deeply"}},
		{"no rules", `{}`, []string{"rules: is required"}},
		{"rules null", `{"rules": null}`, []string{"rules: is null, want a list"}},
		{"an unknown field", `{"rules": [], "hold_byte": 1}`, []string{"hold_byte: is not a known field"}},
		{"a field in another case", `{"Rules": [], "rules": []}`, []string{"Rules: is not a known field"}},
		{"a field twice", `{"rules": [], "rules": []}`, []string{"rules: is given twice"}},
		{"a field twice, deep", entry(`{"key": "a", "header": "x-a", "key": "b"}`), []string{e0 + ".key: is given twice"}},

		{"a timeout of no unit", `{"rules": [], "timeout": "250"}`, []string{"timeout: \"250\" is not a duration"}},
		{"a timeout as a number", `{"rules": [], "timeout": 250}`, []string{"timeout: is a number, want a string"}},
		{"a timeout of zero", `{"rules": [], "timeout": "0s"}`, []string{"timeout: is 0s, want 1ms to 1m0s"}},
		{"a timeout below a millisecond", `{"rules": [], "timeout": "999us"}`, []string{"timeout: is 999µs"}},
		{"a negative timeout", `{"rules": [], "timeout": "-1s"}`, []string{"timeout: is -1s"}},
		{"a long timeout", `{"rules": [], "timeout": "61s"}`, []string{"timeout: is 1m1s"}},
		{"hold_bytes of zero", `{"rules": [], "hold_bytes": 0}`, []string{"hold_bytes: is 0, want 1 to 16777216"}},
		{"hold_bytes too large", `{"rules": [], "hold_bytes": 16777217}`, []string{"hold_bytes: is 16777217"}},
		{"hold_bytes as a fraction", `{"rules": [], "hold_bytes": 1.5}`, []string{"hold_bytes: 1.5 is not a whole number"}},
		{"hold_bytes with an exponent", `{"rules": [], "hold_bytes": 1e3}`, []string{"hold_bytes: 1e3 is not a whole number"}},
		{"hold_bytes beyond 64 bits", `{"rules": [], "hold_bytes": 99999999999999999999}`, []string{"hold_bytes: 99999999999999999999 is not"}},
		{"hold_bytes as text", `{"rules": [], "hold_bytes": "512KiB"}`, []string{"hold_bytes: is a string, want a number"}},

		{"a rule that is no object", `{"rules": [{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}, 1]}`, []string{"rules[1]: is a number, want an object"}},
		{"no descriptors", `{"rules": [{}]}`, []string{"rules[0].descriptors: is required"}},
		{"empty descriptors", `{"rules": [{"descriptors": []}]}`, []string{"rules[0].descriptors: is empty"}},
		{"no entries", `{"rules": [{"descriptors": [{}]}]}`, []string{"rules[0].descriptors[0].entries: is required"}},
		{"empty entries", entry(``), []string{"rules[0].descriptors[0].entries: is empty"}},
		{"a rule's name twice", `{"rules": [
			{"name": "n", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]},
			{"name": "n", "descriptors": [{"entries": [{"key": "b", "header": "x-b"}]}]}]}`, []string{`rules[1].name: "n" is the name of rules[0] too`}},
		{"C32: a descriptor twice", `{"rules": [
			{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]},
			{"descriptors": [{"cost": "one", "entries": [{"header": "X-A", "key": "a", "type": "string"}]}]}]}`, []string{"rules[1].descriptors[0]: is the same as rules[0].descriptors[0]"}},
		{"an unknown cost", `{"rules": [{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}], "cost": "body"}]}]}`, []string{`rules[0].descriptors[0].cost: "body" is not a cost`}},

		{"no key", entry(`{"header": "x-a"}`), []string{e0 + ".key: is required"}},
		{"an empty key", entry(`{"key": "", "header": "x-a"}`), []string{e0 + ".key: is empty"}},
		{"no source", entry(`{"key": "a"}`), []string{e0 + ": has no source"}},
		{"an empty header", entry(`{"key": "a", "header": ""}`), []string{e0 + ".header: is empty"}},
		{"a pseudo-header", entry(`{"key": "a", "header": ":path"}`), []string{e0 + `.header: ":path" is not a header's name`}},
		{"a header with a space", entry(`{"key": "a", "header": "x a"}`), []string{e0 + `.header: "x a" is not a header's name`}},
		{"the host", entry(`{"key": "a", "header": "Host"}`), []string{e0 + ".header: host is not visible"}},
		{"an unknown type", entry(`{"key": "a", "header": "x-a", "type": "int"}`), []string{e0 + `.type: "int" is not a type`}},
		{"an unknown missing", entry(`{"key": "a", "header": "x-a", "missing": "allow"}`), []string{e0 + `.missing: "allow" is not`}},
		{"a default of none", entry(`{"key": "a", "header": "x-a", "missing": "default"}`), []string{e0 + ".default: is required"}},
		{"an empty default", entry(`{"key": "a", "header": "x-a", "missing": "default", "default": ""}`), []string{e0 + ".default: is empty"}},
		{"a default of the wrong type", entry(`{"key": "a", "header": "x-a", "type": "uuid", "missing": "default", "default": "free"}`), []string{e0 + `.default: "free" is not a UUID`}},
		{"a default unused", entry(`{"key": "a", "header": "x-a", "default": "free"}`), []string{e0 + ".default: needs missing: default"}},

		{"all at once", `{"timeout": "x", "hold_bytes": -1, "rules": [{"descriptors": [{"entries": [{"kee": "a"}], "cost": 1}]}], "x": 1}`, []string{
			"x: is not a known field", "timeout: ", "hold_bytes: is -1", e0 + ".kee: is not a known field",
			e0 + ".key: is required", e0 + ": has no source", "rules[0].descriptors[0].cost: is a number, want a string",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			_, err := config.ParseBlock([]byte(tc.text))
			if err == nil {
				t.Fatal("ParseBlock accepts it")
			}
			checkErrors(t, err, tc.want)
		})
	}
}

func checkErrors(t *testing.T, err error, want []string) {
	t.Helper()
	list := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		list = joined.Unwrap()
	}
	if len(list) != len(want) {
		t.Fatalf("%d errors, want %d: %v", len(list), len(want), err)
	}
	for i, e := range list {
		var fault *config.Error
		if !errors.As(e, &fault) {
			t.Errorf("%T is no *config.Error", e)
			continue
		}
		if !strings.Contains(e.Error(), want[i]) {
			t.Errorf("error %d = %q, want %q in it", i, e, want[i])
		}
		if path, _, ok := strings.Cut(want[i], ": "); ok && fault.Path != path {
			t.Errorf("path = %q, want %q", fault.Path, path)
		}
	}
}

func TestParse(t *testing.T) {
	t.Parallel()

	got, err := config.Parse([]byte(`{"version": "7", "domain": "ingest", "cluster": "weir_ratelimit", "filter": ` + full + `}`))
	if err != nil {
		t.Fatal(err)
	}
	want := &config.Config{Version: "7", Domain: "ingest", Cluster: "weir_ratelimit", Block: fullBlock()}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestParseErrors(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		{"nothing", ` `, []string{"unexpected end"}},
		{"an empty object", `{}`, []string{"domain: is required", "cluster: is required", "filter: is required"}},
		{"empty names", `{"domain": "", "cluster": "", "filter": {"rules": []}}`, []string{"domain: is empty", "cluster: is empty"}},
		{"wrong types", `{"version": 7, "domain": 1, "cluster": [], "filter": "x"}`, []string{
			"version: is a number, want a string", "domain: is a number", "cluster: is a list", "filter: is a string, want an object",
		}},
		{"in the block", `{"domain": "d", "cluster": "c", "filter": {"rules": [{"descriptors": [{"entries": [{}]}]}]}, "extra": {}}`, []string{
			"extra: is not a known field", "filter.rules[0].descriptors[0].entries[0].key: is required",
			"filter.rules[0].descriptors[0].entries[0]: has no source",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			_, err := config.Parse([]byte(tc.text))
			if err == nil {
				t.Fatal("Parse accepts it")
			}
			checkErrors(t, err, tc.want)
		})
	}
}

func TestCompose(t *testing.T) {
	t.Parallel()

	got, err := config.Compose("<7>", `a"b`, "c", []byte("{\n\t\"rules\": [ ]\n}\n"))
	if err != nil {
		t.Fatal(err)
	}
	var text struct{ Version, Domain, Cluster string }
	if err := json.Unmarshal(got, &text); err != nil {
		t.Fatal(err)
	}
	if text.Version != "<7>" || text.Domain != `a"b` || text.Cluster != "c" || strings.ContainsAny(string(got), "\n\t ") {
		t.Errorf("Compose = %s", got)
	}

	for _, tc := range []struct {
		name                    string
		version, domain, block  string
		wantPath, wantInMessage string
	}{
		{"no block", "", "d", "", "filter", "unexpected end"},
		{"half a block", "", "d", `{"rules": [}`, "filter", "invalid character"},
		{"two values", "", "d", `{"rules": []},"x":{}`, "filter", "invalid character"},
		{"a block that is not UTF-8", "", "d", "{\"rules\": [], \"\xff\": 1}", "filter", "UTF-8"},
		{"a version that is not UTF-8", "\xff", "d", `{"rules": []}`, "version", "UTF-8"},
		{"a bad rule", "", "d", `{"rules": [1]}`, "filter.rules[0]", "is a number"},
		{"no domain", "", "", `{"rules": []}`, "domain", "is empty"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			_, err := config.Compose(tc.version, tc.domain, "c", []byte(tc.block))
			var fault *config.Error
			if !errors.As(err, &fault) || fault.Path != tc.wantPath || !strings.Contains(fault.Msg, tc.wantInMessage) {
				t.Errorf("Compose = %v, want path %q and %q in the message", err, tc.wantPath, tc.wantInMessage)
			}
		})
	}
}

// A block that parses composes, with any names, and comes back the same; every fault
// is an Error; nothing panics.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full), "7", "ingest", "weir_ratelimit")
	f.Add([]byte(`{"rules": []}`), "", "d", "c")
	f.Add([]byte(entry(`{"key": "a\ud800", "header": "x-a"}`)), "\xff", "\u2028", "<")
	f.Add([]byte(`{"rules": [{"descriptors": [{"entries": [{"key": "a", "key": "b"}]}]}]}`), "", "d", "c")
	f.Add([]byte(`[1,,2]`), "", "d", "c")
	f.Fuzz(func(t *testing.T, text []byte, version, domain, cluster string) {
		if cfg, err := config.Parse(text); (cfg == nil) == (err == nil) {
			t.Errorf("Parse = %v, %v", cfg, err)
		}
		block, err := config.ParseBlock(text)
		composed, composeErr := config.Compose(version, domain, cluster, text)
		named := domain != "" && cluster != "" &&
			utf8.ValidString(version) && utf8.ValidString(domain) && utf8.ValidString(cluster)
		if (composeErr == nil) != (err == nil && named) {
			t.Fatalf("ParseBlock = %v, Compose = %v", err, composeErr)
		}
		for _, err := range []error{err, composeErr} {
			var fault *config.Error
			if err != nil && !errors.As(err, &fault) {
				t.Errorf("%T is no *config.Error: %v", err, err)
			}
		}
		if composeErr != nil {
			return
		}
		got, err := config.Parse(composed)
		if err != nil {
			t.Fatalf("Parse(Compose) = %v", err)
		}
		want := &config.Config{Version: version, Domain: domain, Cluster: cluster, Block: block}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("Parse(Compose) = %+v, want %+v", got, want)
		}
	})
}

func ExampleParseBlock() {
	_, err := config.ParseBlock([]byte(`{"hold_bytes": "512KiB", "rules": []}`))
	fmt.Println(err)
	// Output: hold_bytes: is a string, want a number
}
