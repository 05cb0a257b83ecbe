package extract

import "strings"

// Query returns the parameter called name of the query in target, which is a
// request's :path. The query is read as application/x-www-form-urlencoded: a plus is
// a space, names and values are percent-decoded, and "?k" is "?k=". It returns
// [ErrAbsent], or [ErrRepeated] if the parameter is there twice in whatever spelling.
//
// A bad escape in any name is an error, as there might be a server that reads name
// there; one in another parameter's value is not. Only & separates parameters: to
// servers that split at semicolons too, "?a=1;k=2" has a k, and here it has none.
func Query(target, name string) (string, error) {
	target, _, _ = strings.Cut(target, "#")
	_, query, _ := strings.Cut(target, "?")
	value, found := "", false
	for query != "" {
		var pair string
		pair, query, _ = strings.Cut(query, "&")
		if pair == "" {
			continue // as all readers do: this is no parameter without a name
		}
		key, text, _ := strings.Cut(pair, "=")
		equal, ok := spells(key, name, true)
		switch {
		case !ok:
			return "", errEscape
		case !equal:
			continue
		case found:
			return "", ErrRepeated
		}
		value, found = text, true
	}
	if !found {
		return "", ErrAbsent
	}
	return unescape(value, true)
}
