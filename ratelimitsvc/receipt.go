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
// metadata. Such a refund must bring the descriptors of the charge, all of them in their
// order; one of which nothing is left to give back has hits_addend 0.
const ReceiptKey = "weir-receipt"

// A receipt says when a charge was decided, and which limits were charged: not those that
// an allowed request was let pass without, such as an exhausted one with quota_mode, one in
// shadow that would have refused, or a quota that is inert. All else that a refund needs
// follows from what the refund itself names: the windows are those of its limits at that
// instant.
type receipt struct {
	at      time.Time
	charged []kindSet // of each descriptor; never empty
}

// A kindSet holds some of a descriptor's kinds of limit: a bit each, from the lowest.
type kindSet uint8

func (s kindSet) has(kind debitKind) bool { return s>>kind&1 != 0 }

func (s *kindSet) add(kind debitKind) { *s |= 1 << kind }

// A receipt is written as base64 of a version, the instant in microseconds, a byte for each
// descriptor with its kinds, and a checksum, which covers the domain too. The checksum finds
// what was cut, mixed up or sent for another domain; it is no signature, since who may refund
// is trusted with the amount already.
const (
	receiptVersion = 2
	receiptHead    = 1 + 8 // bytes
	receiptTail    = 4
	maxReceiptSize = receiptHead + maxDescriptors + receiptTail
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

// text writes the receipt for a domain.
func (r receipt) text(domain string) string {
	b := make([]byte, 0, maxReceiptSize)
	b = append(b, receiptVersion)
	b = binary.BigEndian.AppendUint64(b, uint64(r.at.UnixMicro()))
	for _, kinds := range r.charged {
		b = append(b, byte(kinds))
	}
	b = binary.BigEndian.AppendUint32(b, receiptSum(b, domain))
	return receiptText.EncodeToString(b)
}

// parseReceipt reads a receipt of a domain.
func parseReceipt(domain, text string) (receipt, error) {
	if len(text) > receiptText.EncodedLen(maxReceiptSize) {
		return receipt{}, errReceipt
	}
	b, err := receiptText.DecodeString(text)
	if err != nil || len(b) <= receiptHead+receiptTail || b[0] != receiptVersion {
		return receipt{}, errReceipt
	}
	body, sum := b[:len(b)-receiptTail], binary.BigEndian.Uint32(b[len(b)-receiptTail:])
	micros := int64(binary.BigEndian.Uint64(body[1:])) //nolint:gosec // written the same way
	if sum != receiptSum(body, domain) || micros < minReceipt || micros > maxReceipt {
		return receipt{}, errReceipt
	}
	r := receipt{at: time.UnixMicro(micros).UTC(), charged: make([]kindSet, len(body)-receiptHead)}
	for i, kinds := range body[receiptHead:] {
		if kinds>>debitKinds != 0 {
			return receipt{}, errReceipt
		}
		r.charged[i] = kindSet(kinds)
	}
	return r, nil
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
