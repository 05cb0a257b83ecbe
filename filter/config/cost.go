package config

var quantities = []word[TermKind]{
	{"one", TermOne}, {"body_bytes", TermBodyBytes}, {"bytes", TermBytes}, {"grpc_messages", TermMessages},
}

const quantityNoun = "a cost"

// cost reads a descriptor's cost: a word, a term, or a sum of these.
func (d *decoder) cost(path string, fields map[string]node) Cost {
	n, ok := fields["cost"]
	if !ok {
		return Cost{Terms: []Term{{Kind: TermOne, Factor: 1}}}
	}
	path = join(path, "cost")
	if n.kind == kindObject && len(n.fields) == 1 && n.fields[0].name == "sum" {
		return Cost{Terms: d.sum(path, d.fields(path, n, "sum"))}
	}
	return Cost{Terms: []Term{d.term(path, n)}}
}

func (d *decoder) sum(path string, fields map[string]node) []Term {
	var terms []Term
	for at, item := range d.some(path, fields, "sum") {
		terms = append(terms, d.term(at, item))
	}
	if len(terms) == 1 {
		d.fault(join(path, "sum"), "has one term: give it without the sum")
	}
	return terms
}

func (d *decoder) term(path string, n node) Term {
	t := Term{Factor: 1}
	if n.kind == kindString {
		t.Kind, _ = choiceNode(d, path, n, quantityNoun, TermOne, quantities)
		return t
	}
	if n.kind != kindObject {
		d.fault(path, "is %s, want a string or an object", n.kind)
		return t
	}
	known := []string{"count", "factor", "min", "max", "missing", "default"}
	fields := d.fields(path, n, append(known, sourceNames(costSources)...)...)
	t.Factor = d.whole(path, fields, "factor", 1, 1, MaxCost, "units")
	if _, ok := fields["count"]; !ok {
		t.Kind = TermValue
		d.valueTerm(path, fields, &t)
		return t
	}
	t.Kind, _ = choice(d, path, fields, "count", quantityNoun, TermOne, quantities)
	for _, name := range append(known[2:], sourceNames(costSources)...) {
		if _, ok := fields[name]; ok {
			d.fault(join(path, name), "does not go with count")
		}
	}
	return t
}

// valueTerm reads a term whose number stands in the request.
func (d *decoder) valueTerm(path string, fields map[string]node, t *Term) {
	t.Source = d.source(path, fields, costSources)
	t.Min = d.whole(path, fields, "min", 1, 0, MaxCost, "units")
	t.Max = d.whole(path, fields, "max", MaxCost, 0, MaxCost, "units")
	if t.Min > t.Max {
		d.fault(join(path, "min"), "is %d, want at most max, which is %d", t.Min, t.Max)
	}
	missing, ok := d.missing(path, fields)
	t.Missing = missing
	_, given := fields["default"]
	switch {
	case missing == MissingDefault && !given:
		d.fault(join(path, "default"), "is required")
	case missing == MissingDefault:
		t.Default = d.whole(path, fields, "default", 0, 0, MaxCost, "units")
	case given && ok:
		d.fault(join(path, "default"), "needs missing: default")
	}
}
