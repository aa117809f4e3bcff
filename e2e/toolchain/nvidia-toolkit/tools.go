//go:build tools

// Package tools pins the NVIDIA Container Toolkit programs that the test cluster's nodes carry.
package tools

import (
	_ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook"
	_ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk"
)
