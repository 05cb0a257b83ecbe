package store

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/weir-dev/weir/policy"
)

// A KeyCodec gives the bytes that identify a subject: the same for the same subject in
// every process and release, and others for every other subject. Any bytes will do, at any
// length: they are hashed, and their beginning is kept for people to read. An error makes
// the limiter's call fail with [ErrInvalidArgument], before any query.
//
// Every function of this type is a codec. [StringKey], [BytesKey], [IntKey], [UintKey] and
// [UUIDKey] are those of common types.
type KeyCodec[S any] func(subject S) ([]byte, error)

// StringKey is the codec of strings: their bytes, whether or not they are UTF-8.
func StringKey[S ~string](subject S) ([]byte, error) { return []byte(subject), nil }

// BytesKey is the codec of byte slices: the bytes themselves. No bytes are a subject as
// well.
func BytesKey[S ~[]byte](subject S) ([]byte, error) { return subject, nil }

// IntKey is the codec of signed integers: their decimal digits, so that the integer 42 and
// the text "42" are one subject, whatever the integer's type.
func IntKey[S ~int | ~int8 | ~int16 | ~int32 | ~int64](subject S) ([]byte, error) {
	return strconv.AppendInt(nil, int64(subject), 10), nil
}

// UintKey is [IntKey] for unsigned integers.
func UintKey[S ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64](subject S) ([]byte, error) {
	return strconv.AppendUint(nil, uint64(subject), 10), nil
}

// UUIDKey is the codec of UUIDs, of any package: their 36 characters, in lower case.
func UUIDKey[S ~[16]byte](subject S) ([]byte, error) {
	digits := hex.EncodeToString(subject[:])
	return []byte(digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]), nil
}

// limiterID is whose bucket it is: the row's id, and the subject's bytes.
type limiterID struct {
	sum     policy.CounterID
	subject string
}

func (l *Limiter[S]) id(subject S) (limiterID, error) {
	if l.err != nil {
		return limiterID{}, l.err
	}
	key, err := l.codec(subject)
	if err != nil {
		return limiterID{}, fmt.Errorf("%w: encoding a subject of type %T: %w", ErrInvalidArgument, subject, err)
	}
	return limiterID{sum: libraryLimiter(l.namespace, key), subject: string(key)}, nil
}

// libraryLimiter is the id of a limiter's bucket that no policy names. What a policy
// hashes begins with a kind, which is never 0. The texts go in behind their lengths, so
// that no two pairs give the same bytes, whatever bytes they hold.
func libraryLimiter(namespace string, key []byte) policy.CounterID {
	buf := append(make([]byte, 0, 128), "\x00store.Limiter\x00"...)
	buf = binary.AppendUvarint(buf, uint64(len(namespace)))
	buf = append(buf, namespace...)
	buf = binary.AppendUvarint(buf, uint64(len(key)))
	buf = append(buf, key...)
	return sha256.Sum256(buf)
}
