//! etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kerf_toolchain::Toolchain;
use serde_json::json;

use super::node::{MAX_NODES, NODE_ADDRESSES};
use super::pki::{Pki, write_kubeconfig};
use super::process::{Namespaces, Process};
use crate::kerf::NAMESPACE;

/// Ports below the kernel's range for outgoing connections, in equal parts for all slots.
const FIRST_PORT: u16 = 20000;
pub(crate) const PORTS: u16 = 192;

/// Options of a control plane that tests may set.
#[derive(Clone, Debug, Default)]
pub struct ControlPlaneOptions {
    /// Has the API server write each write request to a log; see [`Cluster::audit`](super::Cluster::audit).
    pub audit: bool,
    /// With `audit`: has what Kerf's own parts write in the log, body included.
    pub audit_bodies: bool,
    /// As in `--feature-gates`, for every component, kubelet included.
    pub feature_gates: Vec<(String, bool)>,
    /// As in the API server's `--runtime-config`.
    pub runtime_config: Vec<String>,
    /// Further arguments by component, such as `("kube-controller-manager", "--node-monitor-grace-period=10s")`.
    pub extra_args: Vec<(String, String)>,
}

impl ControlPlaneOptions {
    fn extra_args(&self, component: &str) -> impl Iterator<Item = &str> {
        self.extra_args.iter().filter(move |(name, _)| name == component).map(|(_, arg)| arg.as_str())
    }

    pub(crate) fn feature_gates_arg(&self) -> String {
        let gates: Vec<String> = self.feature_gates.iter().map(|(gate, on)| format!("{gate}={on}")).collect();
        format!("--feature-gates={}", gates.join(","))
    }
}

/// A program of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    Etcd,
    ApiServer,
    ControllerManager,
    Scheduler,
}

impl Component {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
        }
    }
}

/// What all programs of a cluster are started with.
pub(crate) struct Setup {
    pub(crate) dir: PathBuf,
    pub(crate) namespaces: Namespaces,
    pub(crate) toolchain: Toolchain,
    pub(crate) options: ControlPlaneOptions,
    pub(crate) pki: Pki,
    pub(crate) slot: u16,
    pub(crate) next_port: std::sync::Mutex<u16>,
    pub(crate) etcd_ports: (u16, u16),
    pub(crate) api_port: u16,
}

impl Setup {
    pub(crate) fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.api_port)
    }

    /// An address of the cluster's own, by its distance from the first: a /21 of 198.18.0.0/15 (RFC 2544: for tests,
    /// routed nowhere), of which each node has a /25 for its pods.
    pub(crate) fn address(&self, distance: u16) -> Ipv4Addr {
        let first = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + u32::from(self.slot) * 2048;
        Ipv4Addr::from(first + u32::from(distance))
    }

    /// An address of services, which have the last /25. Only the first, 1, leads anywhere, since there is no kube-proxy;
    /// see [`super::service`].
    pub(crate) fn service_address(&self, distance: u16) -> Ipv4Addr {
        self.address(MAX_NODES * NODE_ADDRESSES + distance)
    }

    pub(crate) fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    pub(crate) fn pids(&self) -> PathBuf {
        self.dir.join("pids")
    }

    /// A kubeconfig file of the cluster.
    pub(crate) fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.kubeconfig"))
    }

    /// A TCP port of the cluster's own that nothing listens on.
    pub(crate) fn port(&self) -> Result<u16> {
        next_port(self.slot, &self.next_port)
    }

    /// Writes the certificates, kubeconfigs and the audit policy.
    pub(crate) fn prepare(&self) -> Result<()> {
        let pki = &self.pki;
        pki.server(
            "kube-apiserver",
            &[
                "127.0.0.1",
                "localhost",
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                &self.service_address(1).to_string(),
            ],
        )?;
        pki.user("kubelet-client", "kube-apiserver-kubelet-client", Some("system:masters"))?;
        for (file, user, group) in [
            ("admin", "admin", Some("system:masters")),
            ("kube-controller-manager", "system:kube-controller-manager", None),
            ("kube-scheduler", "system:kube-scheduler", None),
        ] {
            let identity = pki.user(file, user, group)?;
            write_kubeconfig(&self.kubeconfig(file), &pki.kubeconfig(&self.server(), &identity)?)?;
        }
        let writes = json!(["create", "update", "patch", "delete", "deletecollection"]);
        let ours =
            ["operator", "node-daemon"].map(|name| format!("system:serviceaccount:{NAMESPACE}:{name}"));
        let mut rules = vec![json!({ "level": "Metadata", "verbs": writes }), json!({ "level": "None" })];
        if self.options.audit_bodies {
            rules.insert(0, json!({ "level": "Request", "verbs": writes, "users": ours }));
        }
        let policy = json!({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules,
        });
        fs::write(self.dir.join("audit-policy.json"), policy.to_string())
            .context("failed to write the audit policy")
    }

    pub(crate) fn start(&self, component: Component) -> Result<Process> {
        let program = match component {
            Component::Etcd => &self.toolchain.etcd,
            Component::ApiServer => &self.toolchain.kube_apiserver,
            Component::ControllerManager => &self.toolchain.kube_controller_manager,
            Component::Scheduler => &self.toolchain.kube_scheduler,
        };
        let args = match component {
            Component::Etcd => self.etcd_args(),
            Component::ApiServer => self.api_server_args(),
            Component::ControllerManager => self.controller_manager_args(),
            Component::Scheduler => self.scheduler_args(),
        };
        let name = component.name();
        let log = self.logs().join(format!("{name}.log"));
        Process::start(&self.namespaces, name, &log, &self.pids(), program, |command| {
            command.args(args).args(self.options.extra_args(name));
            if component != Component::Etcd {
                command.arg(self.options.feature_gates_arg());
            }
        })
    }

    fn etcd_args(&self) -> Vec<String> {
        let (client, peer) = self.etcd_ports;
        vec![
            format!("--data-dir={}", self.dir.join("etcd").display()),
            format!("--listen-client-urls=http://127.0.0.1:{client}"),
            format!("--advertise-client-urls=http://127.0.0.1:{client}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
            "--unsafe-no-fsync".to_owned(),
            "--logger=zap".to_owned(),
            "--log-level=warn".to_owned(),
        ]
    }

    fn api_server_args(&self) -> Vec<String> {
        let pki = self.dir.join("pki");
        let file = |name: &str| pki.join(name).display().to_string();
        let mut args = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_ports.0),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={}", self.api_port),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--service-cluster-ip-range={}/25", self.service_address(0)),
            format!("--tls-cert-file={}", file("kube-apiserver.crt")),
            format!("--tls-private-key-file={}", file("kube-apiserver.key")),
            format!("--client-ca-file={}", file("ca.crt")),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--allow-privileged=true".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            format!("--service-account-key-file={}", self.pki.service_account_public_key().display()),
            format!("--service-account-signing-key-file={}", self.pki.service_account_key().display()),
            format!("--kubelet-client-certificate={}", file("kubelet-client.crt")),
            format!("--kubelet-client-key={}", file("kubelet-client.key")),
            format!("--kubelet-certificate-authority={}", file("ca.crt")),
            // Node names lead to loopback in the cluster's /etc/hosts.
            "--kubelet-preferred-address-types=Hostname".to_owned(),
            // Webhooks behind a Service are reached at its endpoints: there is no kube-proxy.
            "--enable-aggregator-routing=true".to_owned(),
            // With one API server there is nothing to wait for when it is told to end.
            "--shutdown-delay-duration=0s".to_owned(),
        ];
        if !self.options.runtime_config.is_empty() {
            args.push(format!("--runtime-config={}", self.options.runtime_config.join(",")));
        }
        if self.options.audit {
            args.push(format!("--audit-policy-file={}", self.dir.join("audit-policy.json").display()));
            args.push(format!("--audit-log-path={}", self.audit_log().display()));
            // A request is in the log when it has been answered, so that a test can count.
            args.push("--audit-log-mode=blocking".to_owned());
        }
        args
    }

    pub(crate) fn audit_log(&self) -> PathBuf {
        self.logs().join("audit.log")
    }

    fn controller_manager_args(&self) -> Vec<String> {
        let kubeconfig = self.kubeconfig("kube-controller-manager");
        vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--authentication-kubeconfig={}", kubeconfig.display()),
            format!("--authorization-kubeconfig={}", kubeconfig.display()),
            format!("--service-account-private-key-file={}", self.pki.service_account_key().display()),
            format!("--root-ca-file={}", self.pki.ca().display()),
            "--use-service-account-credentials=true".to_owned(),
            "--secure-port=0".to_owned(),
            "--leader-elect=false".to_owned(),
        ]
    }

    fn scheduler_args(&self) -> Vec<String> {
        let kubeconfig = self.kubeconfig("kube-scheduler");
        vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--authentication-kubeconfig={}", kubeconfig.display()),
            format!("--authorization-kubeconfig={}", kubeconfig.display()),
            "--secure-port=0".to_owned(),
            "--leader-elect=false".to_owned(),
        ]
    }
}

/// The next port of a slot that is free now.
pub(crate) fn next_port(slot: u16, next: &std::sync::Mutex<u16>) -> Result<u16> {
    let mut next = next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for _ in 0..PORTS {
        let port = FIRST_PORT + slot * PORTS + *next % PORTS;
        *next = (*next + 1) % PORTS;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of {PORTS} from {} on is free", FIRST_PORT + slot * PORTS)
}

/// How long a component may take to end before it is killed.
pub(crate) fn grace(component: Component) -> Duration {
    match component {
        // It would wait for its watches to end.
        Component::ApiServer => Duration::ZERO,
        _ => Duration::from_secs(10),
    }
}
