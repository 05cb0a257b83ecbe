package ratelimitsvc

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"time"
)

// ReceiptKey is the gRPC metadata, or the HTTP header, in which a refund brings the
// receipt of the charge that it gives back: the weir.receipt of that answer's dynamic
// metadata.
const ReceiptKey = "weir-receipt"

// A receipt says when a charge was decided. All else that a refund needs follows from
// the instant and from what the refund itself names: the windows are those of its limits
// at that instant.
//
// It is base64 of a version, the instant in microseconds, and a checksum, which covers
// the domain too. The checksum finds what was cut, mixed up or sent for another domain;
// it is no signature, since who may refund is trusted with the amount already.
const (
	receiptVersion = 1
	receiptSize    = 1 + 8 + 4 // bytes
)

var (
	receiptText  = base64.RawURLEncoding.Strict()
	receiptTable = crc32.MakeTable(crc32.Castagnoli)

	errReceipt = errors.New("is not a receipt of this domain")
)

// The span of instants that a receipt may name.
var (
	minReceipt = time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()
	maxReceipt = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()
)

// newReceipt returns the receipt of a charge in a domain at an instant.
func newReceipt(domain string, at time.Time) string {
	b := make([]byte, 0, receiptSize)
	b = append(b, receiptVersion)
	b = binary.BigEndian.AppendUint64(b, uint64(at.UnixMicro()))
	b = binary.BigEndian.AppendUint32(b, receiptSum(b, domain))
	return receiptText.EncodeToString(b)
}

// parseReceipt returns the instant that a receipt names.
func parseReceipt(domain, text string) (time.Time, error) {
	if len(text) != receiptText.EncodedLen(receiptSize) {
		return time.Time{}, errReceipt
	}
	b, err := receiptText.DecodeString(text)
	if err != nil || b[0] != receiptVersion {
		return time.Time{}, errReceipt
	}
	body, sum := b[:receiptSize-4], binary.BigEndian.Uint32(b[receiptSize-4:])
	micros := int64(binary.BigEndian.Uint64(body[1:])) //nolint:gosec // written the same way
	if sum != receiptSum(body, domain) || micros < minReceipt || micros > maxReceipt {
		return time.Time{}, errReceipt
	}
	return time.UnixMicro(micros).UTC(), nil
}

// receiptSum is the CRC-32C of the body and the domain. It is worked out by hand since there
// is a receipt in each answer, and package crc32 would have both texts put on the heap.
func receiptSum(body []byte, domain string) uint32 {
	sum := ^uint32(0)
	for _, c := range body {
		sum = receiptTable[sum&0xff^uint32(c)] ^ sum>>8
	}
	for i := range len(domain) {
		sum = receiptTable[sum&0xff^uint32(domain[i])] ^ sum>>8
	}
	return ^sum
}
