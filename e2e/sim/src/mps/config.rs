//! The configuration file of v3 ("mpsv3-configuration-file").

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

/// The first driver branch whose file can bind namespaces to cgroups and SM partitions (the same page, release 620).
const NAMESPACE_DEVICES_SINCE: u32 = 620;

/// The file. "Any other key is a configuration error."
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(default, rename = "schema_version")]
    _schema_version: Option<String>,
    #[serde(default)]
    pub servers: BTreeMap<String, ServerConfig>,
    #[serde(default)]
    pub features: Features,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerConfig {
    /// Names, with commas between them.
    pub allowed_devices: Option<String>,
    pub pinned_memory_limit: Option<String>,
    pub active_thread_percentage: Option<String>,
    pub client_priority: Option<String>,
    pub uid: Option<u32>,
    #[serde(default)]
    pub locality_domains: bool,
    #[serde(default)]
    pub namespaces: BTreeMap<String, NamespaceConfig>,
    #[serde(default)]
    pub devices: Vec<DeviceConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceConfig {
    pub pinned_memory_limit: Option<String>,
    pub active_thread_percentage: Option<String>,
    pub client_priority: Option<String>,
    #[serde(default)]
    pub devices: Vec<NamespaceDevice>,
}

/// Which partition the clients of a namespace have.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceDevice {
    pub uuid: String,
    pub sm_partition: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    pub uuid: String,
    #[serde(default)]
    pub sm_partitions: Vec<PartitionConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionConfig {
    pub name: String,
    pub chunks: u32,
    #[serde(default)]
    pub include_remainder: bool,
}

/// "Features": both are on by default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Features {
    #[serde(default)]
    pub memacct: Memacct,
    #[serde(default, rename = "context-share")]
    pub context_share: ContextShare,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memacct {
    pub enabled: bool,
    pub audit_log: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ContextShare {
    pub enabled: bool,
    pub default_socket: String,
}

impl Default for Memacct {
    fn default() -> Memacct {
        Memacct { enabled: true, audit_log: false }
    }
}

impl Default for ContextShare {
    fn default() -> ContextShare {
        ContextShare { enabled: true, default_socket: "on".into() }
    }
}

impl Config {
    pub fn read(path: &Path, branch: u32) -> Result<Config, String> {
        let text =
            std::fs::read_to_string(path).map_err(|e| format!("failed to read {}: {e}", path.display()))?;
        let config: Config =
            toml::from_str(&text).map_err(|e| format!("configuration error in {}: {e}", path.display()))?;
        let namespaces = config.servers.values().flat_map(|server| server.namespaces.iter());
        for (name, namespace) in namespaces {
            if !namespace.devices.is_empty() && branch < NAMESPACE_DEVICES_SINCE {
                return Err(format!(
                    "configuration error in {}: namespace {name}: unknown key devices",
                    path.display()
                ));
            }
        }
        Ok(config)
    }
}
