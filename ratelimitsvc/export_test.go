package ratelimitsvc

import (
	"context"
	"time"

	"google.golang.org/grpc/encoding"
)

// What tests see of the inside.
var (
	Codec encoding.CodecV2 = codec{encoding.GetCodecV2("proto")}

	NewReceipt   = newReceipt
	ParseReceipt = parseReceipt
)

// RefreshUsage reads the usage for the gauges once.
func (s *Service) RefreshUsage(ctx context.Context) { s.refreshUsage(ctx) }

// CheckHealth is what Run does once a second.
func (s *Service) CheckHealth(ctx context.Context) { s.checkHealth(ctx) }

// MinReceipt and MaxReceipt bound the instants of receipts.
func MinReceipt() time.Time { return time.UnixMicro(minReceipt) }
func MaxReceipt() time.Time { return time.UnixMicro(maxReceipt) }
