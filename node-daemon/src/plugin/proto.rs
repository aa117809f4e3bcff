//! kubelet's interfaces, compiled from `proto/`.
#![allow(missing_debug_implementations, reason = "generated clients and servers have none")]
#![allow(clippy::all, reason = "generated")]

/// `pluginregistration.v1`.
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// `k8s.io.kubelet.pkg.apis.dra.v1`.
pub mod dra {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// `dra-health/v1`.
pub mod health {
    tonic::include_proto!("v1");
}
