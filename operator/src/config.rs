//! Command line and environment.

use std::net::SocketAddr;

use clap::Parser;

use crate::webhook::WebhookConfig;

/// Kerf's operator: places pods on partitions of GPUs, follows policies, and admits pods that ask for GPUs.
#[derive(Clone, Debug, Parser)]
#[command(name = "kerf-operator", version)]
pub struct Config {
    /// Namespace of the operator's own objects: its lease, its service, its certificates.
    #[arg(long, env = "POD_NAMESPACE", default_value = "kerf-system")]
    pub namespace: String,

    /// Name of the Lease that elects the replica which decides.
    #[arg(long, env = "LEASE_NAME", default_value = "kerf-operator")]
    pub lease_name: String,

    /// This replica's name in the Lease; must differ between replicas. Default: the host name and a number.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,

    /// Where the admission webhook listens.
    #[arg(long, env = "WEBHOOK_ADDRESS", default_value = "0.0.0.0:9443")]
    pub webhook_address: SocketAddr,

    /// Further names or IP addresses at which the API server reaches the webhook, for its certificate (an operator
    /// outside the cluster, behind `clientConfig.url`).
    #[arg(long, env = "WEBHOOK_NAMES", value_delimiter = ',')]
    pub webhook_names: Vec<String>,

    /// Port on loopback at which the last plans can be read (`/debug/plans`), for `kerf-whatif replay`.
    #[arg(long, env = "DEBUG_PORT", default_value_t = 9444)]
    pub debug_port: u16,
}

impl Config {
    /// What the webhook is told.
    pub fn webhook(&self) -> WebhookConfig {
        WebhookConfig {
            listen: self.webhook_address,
            namespace: self.namespace.clone(),
            extra_names: self.webhook_names.iter().filter(|name| !name.is_empty()).cloned().collect(),
            ..WebhookConfig::default()
        }
    }

    /// The identity, made up where none was given.
    pub fn identity(&self) -> String {
        self.identity.clone().unwrap_or_else(|| {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            format!("{}-{}", host.trim(), std::process::id())
        })
    }
}
