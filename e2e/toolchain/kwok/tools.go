//go:build tools

// Package tools pins kwok, which plays the nodes of a large test cluster.
package tools

import _ "sigs.k8s.io/kwok/cmd/kwok"
