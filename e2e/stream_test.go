package e2e_test

import (
	"bytes"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
)

// A budget that hardly refills, so that what is given back can be told from that.
const streamPolicy = `domain: ingest
descriptors:
  - key: node
    budget: {scope: ingest_node, per_second: 1KiB, burst: 3MiB}
filter:
  timeout: 5s
  rules:
    - name: uploads
      descriptors:
        - entries: [{key: node, path: {pattern: "/up/{node}"}, type: uuid}]
          cost: body_bytes
`

const streamClients = `clients:
  - {network: 127.0.0.0/8, refunds: true}
`

// A body of unknown length that is too long to be held is charged in blocks, to the byte
// in the end, and cut off where the budget ends.
func TestStreamedBodies(t *testing.T) {
	t.Parallel()

	folder := t.TempDir()
	policy, clients := filepath.Join(folder, "policy.yaml"), filepath.Join(folder, "clients.yaml")
	for path, text := range map[string]string{policy: streamPolicy, clients: streamClients} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := startMesh(t, meshConfig{policy: policy, serve: []string{"--clients", clients}})
	const half = 3 << 19

	t.Run("charged to the byte", func(t *testing.T) {
		t.Parallel()

		path := "/up/" + uuid.NewString()
		a := m.request(t, http.MethodPost, path, nil, chunked(make([]byte, half)))
		if _, _, got := m.upstream.saw(path); a.status != http.StatusOK || got != half {
			t.Fatalf("%s, and the upstream saw %d bytes, want 200 and %d", describe(a), got, half)
		}
		// All that is left can be spent, and that is only so once the last block, of
		// which at least a half was not used, has come back.
		eventually(t, 10*time.Second, "the rest comes back", func() error {
			if a := m.request(t, http.MethodPost, path, nil, bytes.NewReader(make([]byte, half))); a.status != http.StatusOK {
				return errors.New(describe(a))
			}
			return nil
		})
		// 32 KiB would take half a minute to come by themselves.
		if a := m.request(t, http.MethodPost, path, nil, bytes.NewReader(make([]byte, 32<<10))); a.status != http.StatusTooManyRequests {
			t.Errorf("over the budget: %s, want 429", describe(a))
		}
	})

	t.Run("cut off at the budget's end", func(t *testing.T) {
		t.Parallel()

		path := "/up/" + uuid.NewString()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+m.gateway+path, chunked(make([]byte, 8<<20)))
		if err != nil {
			t.Fatal(err)
		}
		// A client that is still writing may see the connection end before the answer.
		response, err := http.DefaultClient.Do(request)
		if err == nil {
			if response.StatusCode != http.StatusTooManyRequests {
				t.Errorf("status = %d, want 429", response.StatusCode)
			}
			if err := response.Body.Close(); err != nil {
				t.Error(err)
			}
		}
		begun, whole, got := m.upstream.saw(path)
		if begun != 1 || whole != 0 || got > 3<<20+64<<10 {
			t.Errorf("the upstream saw %d requests, %d of them whole, and %d bytes, want part of one", begun, whole, got)
		}
	})
}
