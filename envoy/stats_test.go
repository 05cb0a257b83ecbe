package envoy_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/envoyproc/envoytest"
)

// The names of the filter's metrics, and what each is in Prometheus's format. No rule's
// name ends in a dot: Envoy drops it from a label, so that two rules would become one.
var metrics = []struct{ name, want string }{
	{"weir_filter_requests_outcome=allowed", `weir_filter_requests{outcome="allowed"}`},
	{"weir_filter_requests_rule=a.b_outcome=allowed", `weir_filter_requests{rule="a.b",outcome="allowed"}`},
	{"weir_filter_requests_rule=outcome_outcome=denied", `weir_filter_requests{rule="outcome",outcome="denied"}`},
	{"weir_filter_cost_missing_rule=Upload.V-2_reason=absent", `weir_filter_cost_missing{rule="Upload.V-2",reason="absent"}`},
	{"weir_filter_units_rule=.a..b-_kind=charged", `weir_filter_units{rule=".a..b-",kind="charged"}`},
	{"weir_filter_units_rule=" + strings.Repeat(".a", 32) + "_kind=refunded", `weir_filter_units{rule="` + strings.Repeat(".a", 32) + `",kind="refunded"}`},
	{"weir_filter_refunds_outcome=lost", `weir_filter_refunds{outcome="lost"}`},
}

// Envoy's rule: the first group of a tag's expression is cut out of the name, the second
// is its value. It tries all against the whole name.
func TestStatsTags(t *testing.T) {
	t.Parallel()

	b, err := sample(t).Bootstrap()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range metrics {
		full := "wasmcustom." + m.name
		name := full
		labels := make(map[string]string)
		for _, tag := range b.GetStatsConfig().GetStatsTags() {
			groups := regexp.MustCompile(tag.GetRegex()).FindStringSubmatch(full)
			if groups == nil {
				continue
			}
			name = strings.Replace(name, groups[1], "", 1)
			labels[tag.GetTagName()] = groups[2]
		}
		wantName, wantLabels := parseMetric(t, m.want)
		if name != "wasmcustom."+wantName {
			t.Errorf("%s is %s, want %s", m.name, name, wantName)
		}
		if diff := cmp.Diff(wantLabels, labels); diff != "" {
			t.Errorf("labels of %s (-want +got):\n%s", m.name, diff)
		}
	}
	// What is not the filter's is left alone.
	for _, tag := range b.GetStatsConfig().GetStatsTags() {
		for _, name := range []string{"cluster.a_rule=b.upstream_rq_total", "wasmcustom.other_rule=b"} {
			if regexp.MustCompile(tag.GetRegex()).MatchString(name) {
				t.Errorf("the tag %s matches %s", tag.GetTagName(), name)
			}
		}
	}
}

// parseMetric reads a metric as Prometheus writes it, of labels without commas.
func parseMetric(t *testing.T, text string) (name string, labels map[string]string) {
	t.Helper()
	name, rest, _ := strings.Cut(strings.TrimSuffix(text, "}"), "{")
	labels = make(map[string]string)
	for label := range strings.SplitSeq(rest, ",") {
		key, value, _ := strings.Cut(label, "=")
		if _, err := fmt.Sscanf(value, "%q", &value); err != nil {
			t.Fatal(err)
		}
		labels[key] = value
	}
	return name, labels
}

// The real Envoy makes labels of them, by a module that counts one on each.
func TestEnvoyLabelsMetrics(t *testing.T) {
	t.Parallel()

	module := filepath.Join(t.TempDir(), "metrics.wasm")
	build := exec.CommandContext(envoytest.Within(t), "go", "build", "-buildmode=c-shared", "-o", module, "./testdata/metrics")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var names strings.Builder
	for _, m := range metrics {
		names.WriteString(m.name + "\n")
	}
	c := local(t)
	c.Module = envoy.Module{Path: module}
	b, err := c.Bootstrap()
	if err != nil {
		t.Fatal(err)
	}
	configureFilter(t, b, names.String())
	e := envoytest.Start(t, b)
	if err := e.WaitReady(envoytest.Within(t)); err != nil {
		t.Fatal(err)
	}
	admin, err := e.Admin()
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{url: "http://" + admin}
	text := g.do(t, client(t, false), http.MethodGet, "/stats/prometheus", nil).body
	for _, m := range metrics {
		wantName, wantLabels := parseMetric(t, m.want)
		if !slices.ContainsFunc(strings.Split(text, "\n"), func(line string) bool {
			metric, _, _ := strings.Cut(line, "} ")
			if !strings.HasPrefix(metric, wantName+"{") {
				return false
			}
			_, labels := parseMetric(t, metric)
			return cmp.Equal(wantLabels, labels)
		}) {
			t.Errorf("the statistics have no %s", m.want)
		}
	}
	if t.Failed() {
		for line := range strings.Lines(text) {
			if strings.Contains(line, "weir_filter") {
				t.Log(line)
			}
		}
	}
}
