package extract_test

import (
	"errors"
	"strconv"

	"github.com/weir-dev/weir/filter/extract"
)

// What outcome says for the errors that are told apart.
const (
	absent   = "absent"
	repeated = "repeated"
	tooLarge = "too large"
)

// outcome writes down what an extractor returned: the value in quotes, or the error.
func outcome(value string, err error) string {
	switch {
	case err != nil && value != "":
		return strconv.Quote(value) + " along with: " + err.Error()
	case errors.Is(err, extract.ErrAbsent):
		return absent
	case errors.Is(err, extract.ErrRepeated):
		return repeated
	case errors.Is(err, extract.ErrTooLarge):
		return tooLarge
	case err != nil:
		return err.Error()
	}
	return strconv.Quote(value)
}
