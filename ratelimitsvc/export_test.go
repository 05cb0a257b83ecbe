package ratelimitsvc

import (
	"context"
	"time"

	"google.golang.org/grpc/encoding"
)

// What tests see of the inside.
var (
	Codec encoding.CodecV2 = codec{encoding.GetCodecV2("proto")}
)

// NewReceipt writes a receipt.
func NewReceipt(domain string, at time.Time, charged ...byte) string {
	r := receipt{at: at}
	for _, kinds := range charged {
		r.charged = append(r.charged, kindSet(kinds))
	}
	return r.text(domain)
}

// ParseReceipt reads one.
func ParseReceipt(domain, text string) (at time.Time, charged []byte, err error) {
	r, err := parseReceipt(domain, text)
	for _, kinds := range r.charged {
		charged = append(charged, byte(kinds))
	}
	return r.at, charged, err
}

// RefreshUsage reads the usage for the gauges once.
func (s *Service) RefreshUsage(ctx context.Context) { s.refreshUsage(ctx) }

// CheckHealth and EnrolAgain are what Run does once a second, beside each other.
func (s *Service) CheckHealth(ctx context.Context) { s.checkHealth(ctx) }
func (s *Service) EnrolAgain(ctx context.Context)  { s.enrolAgain(ctx) }

// MinReceipt and MaxReceipt bound the instants of receipts.
func MinReceipt() time.Time { return time.UnixMicro(minReceipt) }
func MaxReceipt() time.Time { return time.UnixMicro(maxReceipt) }
