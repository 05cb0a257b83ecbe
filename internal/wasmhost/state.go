package wasmhost

import "sync"

// SharedData is what VMs of one vm_id share. Its zero value is empty. It is safe for
// concurrent use.
type SharedData struct {
	mu      sync.Mutex
	entries map[string]sharedEntry
	lastCAS uint32 // one counter for all keys, as in Envoy
}

type sharedEntry struct {
	value []byte
	cas   uint32
}

// Get returns a value and its compare-and-swap number.
func (d *SharedData) Get(key string) (value []byte, cas uint32, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.entries[key]
	return e.value, e.cas, ok
}

// Set stores a value. With cas 0 it overwrites whatever is there; otherwise it reports
// false if the key exists with another number. (A key that does not exist takes any.)
func (d *SharedData) Set(key string, value []byte, cas uint32) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.entries[key]; ok && cas != 0 && cas != e.cas {
		return false
	}
	if d.entries == nil {
		d.entries = map[string]sharedEntry{}
	}
	d.lastCAS++
	d.entries[key] = sharedEntry{value, d.lastCAS}
	return true
}

// metrics are a VM's. Each definition gets a number of its own, as in Envoy; those of
// one name share a value.
type metrics struct {
	names  []string
	values map[string]int64
}

func (m *metrics) define(name string) uint32 {
	if m.values == nil {
		m.values = map[string]int64{}
	}
	if _, ok := m.values[name]; !ok {
		m.values[name] = 0
	}
	m.names = append(m.names, name)
	return u32(u64(len(m.names)))
}

func (m *metrics) name(id uint32) (string, bool) {
	if id == 0 || int(id) > len(m.names) {
		return "", false
	}
	return m.names[id-1], true
}

func (m *metrics) value(name string) (int64, bool) {
	v, ok := m.values[name]
	return v, ok
}
