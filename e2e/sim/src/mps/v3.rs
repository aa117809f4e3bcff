//! The commands of the third protocol ("mpsv3-interface").

use std::collections::BTreeMap;
use std::sync::Arc;

use super::config::{Config, ServerConfig};
use super::control::{Daemon, Server, ServerState, lock};
use super::server::{Limits, Order, Partition, Report, Settings};
use super::v2::{partition_id, used_chunks};
use super::values::{chunk, find, parse_bytes};
use crate::kernel::protocol::Device;

type Result<T> = std::result::Result<T, String>;

/// A command line, taken apart: words, and `--key=value` or `--flag`.
struct Arguments<'a> {
    words: Vec<&'a str>,
    options: BTreeMap<&'a str, &'a str>,
}

impl<'a> Arguments<'a> {
    fn new(all: &[&'a str]) -> Arguments<'a> {
        let mut arguments = Arguments { words: Vec::new(), options: BTreeMap::new() };
        for word in all {
            match (word.strip_prefix("--"), word.split_once('=')) {
                (Some(option), _) => {
                    let (key, value) = option.split_once('=').unwrap_or((option, ""));
                    arguments.options.insert(key, value);
                }
                // "--key=value / key=value"
                (None, Some((key, value))) => {
                    arguments.options.insert(key, value);
                }
                (None, None) => arguments.words.push(word),
            }
        }
        arguments
    }

    fn word(&self, index: usize, what: &str) -> Result<&'a str> {
        self.words.get(index).copied().ok_or_else(|| format!("{what} is missing"))
    }

    fn option(&self, key: &str) -> Option<&'a str> {
        self.options.get(key).copied()
    }

    fn needed(&self, key: &str) -> Result<&'a str> {
        self.option(key).ok_or_else(|| format!("--{key}= is missing"))
    }

    /// Refuses options that the command does not have.
    fn only(&self, known: &[&str]) -> Result<()> {
        match self.options.keys().find(|key| !known.contains(key)) {
            Some(key) => Err(format!("unknown option --{key}")),
            None => Ok(()),
        }
    }
}

/// Runs a command and returns what it prints.
pub fn command(daemon: &Arc<Daemon>, uid: u32, words: &[&str]) -> Result<String> {
    let (module, verb) = match *words {
        ["quit", ..] => daemon.quit(true, None),
        [module, verb, ..] => (module, verb),
        _ => return Err(format!("unknown command {}", words.join(" "))),
    };
    let arguments = Arguments::new(&words[2..]);
    match (module, verb) {
        ("server", "create") => server_create(daemon, uid, &arguments),
        ("server", "delete") => server_delete(daemon, &arguments),
        ("server", "list") => {
            arguments.only(&["format"])?;
            let wanted = arguments.words.first();
            let servers =
                all_servers(daemon).into_iter().filter(|s| wanted.is_none_or(|name| s.name() == *name));
            let rows: Vec<_> = servers.map(|server| server_row(&server)).collect();
            if let (Some(name), true) = (wanted, rows.is_empty()) {
                return Err(format!("there is no server {name}"));
            }
            table(&arguments, &SERVER_COLUMNS, rows)
        }
        ("server", "set") => {
            arguments.only(&["uid", "pinned-memory-limit", "active-thread-percentage", "client-priority"])?;
            let server = server(daemon, arguments.word(0, "the server's name")?)?;
            // "applied to the server's default namespace"
            set_limits(&server, "default", &arguments)
        }
        ("server", "get") => {
            let server = server(daemon, arguments.word(0, "the server's name")?)?;
            field(&SERVER_COLUMNS, &server_row(&server), arguments.word(1, "the field")?)
        }
        ("namespace", "create") => namespace_create(daemon, &arguments),
        ("namespace", "delete") => namespace_delete(daemon, &arguments),
        ("namespace", "list") => {
            arguments.only(&["format", "server"])?;
            let of = arguments.option("server");
            let servers = all_servers(daemon).into_iter().filter(|s| of.is_none_or(|name| s.name() == name));
            let mut rows: Vec<_> = servers.flat_map(|server| namespace_rows(&server)).collect();
            if let Some(name) = arguments.words.first() {
                rows.retain(|row| row[0] == *name);
            }
            table(&arguments, &NAMESPACE_COLUMNS, rows)
        }
        ("namespace", "set") => {
            arguments.only(&[
                "server",
                "pinned-memory-limit",
                "active-thread-percentage",
                "client-priority",
            ])?;
            let server = server(daemon, arguments.needed("server")?)?;
            set_limits(&server, arguments.word(0, "the namespace's name")?, &arguments)
        }
        ("namespace", "get") => {
            let name = arguments.word(0, "the namespace's name")?;
            let server = server(daemon, arguments.word(1, "the server's name")?)?;
            let rows = namespace_rows(&server);
            let row = rows.iter().find(|row| row[0] == name).ok_or_else(|| no_namespace(name))?;
            field(&NAMESPACE_COLUMNS, row, arguments.word(2, "the field")?)
        }
        ("client", "list") => {
            arguments.only(&["format", "server", "all"])?;
            let of = arguments.option("server");
            let rows = clients(daemon).into_iter().filter(|row| of.is_none_or(|name| row[1] == name));
            table(&arguments, &["PID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"], rows.collect())
        }
        ("client", "get") => {
            let pid = arguments.word(0, "the client's PID")?;
            let rows = clients(daemon);
            let row =
                rows.iter().find(|row| row[0] == pid).ok_or_else(|| format!("there is no client {pid}"))?;
            field(&["PID", "SERVER", "DEVICE", "MAWS-NS", "CMD"], row, arguments.word(1, "the field")?)
        }
        ("client", "terminate") => {
            let pid = arguments.word(0, "the client's PID")?;
            let number = pid.parse().map_err(|_| format!("{pid} is no PID"))?;
            let servers = daemon.servers();
            let mut ended = servers.iter().map(|server| server.ask(&Order::Terminate { pid: number }));
            match ended.any(|report| matches!(report, Some(Report::Done))) {
                true => Ok(String::new()),
                false => Err(format!("there is no client {pid}")),
            }
        }
        ("device", "list") => device_list(daemon, &arguments),
        ("sm-partition", "create") => partition_create(daemon, &arguments),
        ("sm-partition", "delete") => partition_delete(daemon, &arguments),
        ("sm-partition", "list") => partition_list(daemon, &arguments),
        ("feature", verb) => feature(daemon, verb, &arguments),
        ("memacct", "set") => {
            daemon.inner().features.memacct.audit_log = boolean(arguments.needed("audit_log")?)?;
            Ok(String::new())
        }
        ("memacct", "describe") => {
            let audit_log = daemon.inner().features.memacct.audit_log;
            table(&arguments, &["KEY", "VALUE"], vec![vec!["audit_log".into(), audit_log.to_string()]])
        }
        _ => Err(format!("unknown command {module} {verb}")),
    }
}

const SERVER_COLUMNS: [&str; 7] =
    ["NAME", "UID", "PID", "STATUS", "PIPE-DIRECTORY", "ALLOWED-DEVICES", "CONTEXT-IDS"];
const NAMESPACE_COLUMNS: [&str; 7] = [
    "NAME",
    "SERVER",
    "SERVER-STATUS",
    "PINNED-MEMORY-LIMIT",
    "ACTIVE-THREAD-PERCENTAGE",
    "CLIENT-PRIORITY",
    "PIPE-DIRECTORY",
];

/// All servers that were made and not deleted; one that has ended stays in the list.
fn all_servers(daemon: &Daemon) -> Vec<Arc<Server>> {
    daemon.inner().servers.clone()
}

fn server(daemon: &Daemon, name: &str) -> Result<Arc<Server>> {
    let found = all_servers(daemon).into_iter().find(|server| server.name() == name);
    found.ok_or_else(|| format!("there is no server {name}"))
}

fn no_namespace(name: &str) -> String {
    format!("there is no namespace {name}")
}

fn status(server: &Server) -> &'static str {
    match server.state() {
        ServerState::Initializing => "Initializing",
        ServerState::Exited => "Exited",
        ServerState::Active => match server.clients() {
            Some((true, _)) => "Fault",
            Some((false, _)) => "Ready",
            None => "Exited",
        },
    }
}

fn server_row(server: &Server) -> Vec<String> {
    let status = status(server);
    let settings = lock(&server.settings);
    vec![
        settings.name.clone().unwrap_or_default(),
        settings.uid.to_string(),
        if status == "Exited" { "-".into() } else { server.pid.to_string() },
        status.into(),
        settings.pipe.display().to_string(),
        settings.allowed.as_ref().map_or_else(|| "-".into(), |names| names.join(";")),
        "-".into(),
    ]
}

fn namespace_rows(server: &Server) -> Vec<Vec<String>> {
    let status = status(server);
    let settings = lock(&server.settings);
    let row = |(name, limits): (&String, &Limits)| {
        vec![
            name.clone(),
            settings.name.clone().unwrap_or_default(),
            status.into(),
            limits.pinned.last().map_or_else(|| "-".into(), |(_, bytes)| unit(*bytes)),
            limits.percentage.map_or_else(|| "-".into(), |percentage| percentage.to_string()),
            limits.priority.unwrap_or(0).to_string(),
            settings.pipe.join(name).display().to_string(),
        ]
    };
    settings.namespaces.iter().map(row).collect()
}

/// In the largest unit that divides it.
fn unit(bytes: u64) -> String {
    let fits =
        [(30, 'G'), (20, 'M'), (10, 'K')].into_iter().find(|(shift, _)| bytes.trailing_zeros() >= *shift);
    fits.map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// One row per client and device.
fn clients(daemon: &Daemon) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for server in daemon.servers() {
        let name = server.name();
        for client in server.clients().map(|(_, clients)| clients).unwrap_or_default() {
            for (ordinal, _) in server_devices(daemon, &server).iter().enumerate() {
                rows.push(vec![
                    client.pid.to_string(),
                    name.clone(),
                    ordinal.to_string(),
                    client.namespace.clone(),
                    client.command.clone(),
                ]);
            }
        }
    }
    rows
}

fn server_devices(daemon: &Daemon, server: &Server) -> Vec<Device> {
    let allowed = lock(&server.settings).allowed.clone();
    match allowed {
        None => daemon.devices.clone(),
        Some(names) => {
            let found = names.iter().filter_map(|name| find(&daemon.devices, name));
            found.map(|index| daemon.devices[index].clone()).collect()
        }
    }
}

/// `--format=<table|csv>[,noheader]`.
fn table(arguments: &Arguments<'_>, columns: &[&str], rows: Vec<Vec<String>>) -> Result<String> {
    let format = arguments.option("format").unwrap_or("table");
    let (format, header) = match format.split_once(',') {
        Some((format, "noheader")) => (format, false),
        None => (format, true),
        Some(_) => return Err(format!("unknown format {format}")),
    };
    let head = columns.iter().map(|column| (*column).to_owned()).collect::<Vec<_>>();
    let all: Vec<Vec<String>> = header.then_some(head).into_iter().chain(rows).collect();
    let lines: Vec<String> = match format {
        "csv" => all.iter().map(|row| row.join(",")).collect(),
        "table" => {
            let width = |column: usize| all.iter().map(|row| row[column].len()).max().unwrap_or(0);
            let widths: Vec<usize> = (0..columns.len()).map(width).collect();
            let pad = |(cell, width): (&String, &usize)| format!("{cell:<width$}");
            let line = |row: &Vec<String>| row.iter().zip(&widths).map(pad).collect::<Vec<_>>().join("  ");
            all.iter().map(|row| line(row).trim_end().to_owned()).collect()
        }
        other => return Err(format!("unknown format {other}")),
    };
    Ok(lines.iter().map(|line| format!("{line}\n")).collect())
}

fn field(columns: &[&str], row: &[String], name: &str) -> Result<String> {
    let found = columns.iter().position(|column| column.eq_ignore_ascii_case(name));
    found.map(|index| format!("{}\n", row[index])).ok_or_else(|| format!("unknown field {name}"))
}

fn boolean(text: &str) -> Result<bool> {
    text.parse().map_err(|_| format!("{text} is neither true nor false"))
}

/// "lowercase letters, digits, and underscores only, up to 64 characters"
fn check_name(name: &str) -> Result<()> {
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.is_empty() || name.len() > 64 || !name.chars().all(valid) {
        return Err(format!("{name:?} is no name: lowercase letters, digits and underscores, up to 64"));
    }
    Ok(())
}

/// Starts what a configuration file names. A server that cannot come up is found out later.
pub fn apply(daemon: &Arc<Daemon>, config: Config) -> Result<()> {
    for (name, server) in config.servers {
        let uid = server.uid;
        let settings =
            from_config(daemon, &name, server).map_err(|e| format!("configuration error: {name}: {e}"))?;
        check_owner(daemon, uid)?;
        daemon.start_server(settings)?;
    }
    Ok(())
}

fn from_config(daemon: &Daemon, name: &str, config: ServerConfig) -> Result<Settings> {
    let mut settings = new_server(daemon, name, config.uid.unwrap_or(0), config.allowed_devices.as_deref())?;
    let own = Arguments {
        words: Vec::new(),
        options: options(
            &config.pinned_memory_limit,
            &config.active_thread_percentage,
            &config.client_priority,
        ),
    };
    for device in &config.devices {
        for partition in &device.sm_partitions {
            let mut inner = daemon.inner();
            inner.partitions_made += 1;
            settings.partitions.push(Partition {
                name: partition.name.clone(),
                device: device.uuid.clone(),
                chunks: partition.chunks,
                include_remainder: partition.include_remainder,
                id: partition_id(3, inner.partitions_made),
            });
        }
    }
    // The server's limits are the default namespace's; a named one does not inherit them ("Per-GPU compute and memory
    // limits with MPS").
    limits(settings.namespaces.entry("default".into()).or_default(), &own)?;
    for (name, namespace) in &config.namespaces {
        check_name(name)?;
        let own = Arguments {
            words: Vec::new(),
            options: options(
                &namespace.pinned_memory_limit,
                &namespace.active_thread_percentage,
                &namespace.client_priority,
            ),
        };
        let entry = settings.namespaces.entry(name.clone()).or_default();
        limits(entry, &own)?;
        let bound = namespace.devices.iter().map(|device| (device.uuid.clone(), device.sm_partition.clone()));
        entry.partitions = bound.collect();
    }
    for device in &daemon.devices {
        check_chunks(&settings.partitions, device)?;
    }
    Ok(settings)
}

fn options<'a>(
    pinned: &'a Option<String>,
    percentage: &'a Option<String>,
    priority: &'a Option<String>,
) -> BTreeMap<&'a str, &'a str> {
    let all = [
        ("pinned-memory-limit", pinned),
        ("active-thread-percentage", percentage),
        ("client-priority", priority),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?))).collect()
}

fn new_server(daemon: &Daemon, name: &str, uid: u32, allowed: Option<&str>) -> Result<Settings> {
    check_name(name)?;
    if server(daemon, name).is_ok() {
        return Err(format!("there is a server {name} already"));
    }
    let allowed = allowed.map(|names| names.split(',').map(|name| name.trim().to_owned()).collect());
    Ok(Settings {
        name: Some(name.to_owned()),
        pipe: daemon.pipe.join(name),
        log: daemon.log_folder().join(name),
        uid,
        multiuser: daemon.multiuser,
        visible: daemon.visible(),
        allowed,
        namespaces: [("default".to_owned(), Limits::default())].into(),
        static_partitions: false,
        partitions: Vec::new(),
        evicts: daemon.inner().features.memacct.enabled,
    })
}

/// "In multiuser mode, only --uid=0 is allowed".
fn check_owner(daemon: &Daemon, uid: Option<u32>) -> Result<()> {
    match uid {
        Some(uid) if daemon.multiuser && uid != 0 => Err("in multiuser mode a server is root's".into()),
        _ => Ok(()),
    }
}

fn server_create(daemon: &Arc<Daemon>, peer: u32, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["uid", "allowed-devices", "locality-domains"])?;
    let uid = arguments.option("uid").map(|uid| uid.parse().map_err(|_| format!("{uid} is no user id")));
    let uid: Option<u32> = uid.transpose()?;
    check_owner(daemon, uid)?;
    let name = match (arguments.words.first(), uid) {
        (Some(name), _) => (*name).to_owned(),
        (None, Some(uid)) => format!("uid_{uid}"),
        (None, None) => return Err("either a name or --uid= must be given".into()),
    };
    let owner = if daemon.multiuser { 0 } else { uid.unwrap_or(peer) };
    let settings = new_server(daemon, &name, owner, arguments.option("allowed-devices"))?;
    daemon.start_server(settings)?;
    Ok(String::new())
}

/// "each connecting UID is automatically served by a `uid_<uid>` server" (common-tasks).
pub fn server_of_user(daemon: &Arc<Daemon>, uid: u32) -> Result<Arc<Server>> {
    let name = format!("uid_{uid}");
    daemon.inner().servers.retain(|server| server.name() != name || server.state() != ServerState::Exited);
    let settings = new_server(daemon, &name, uid, None)?;
    daemon.start_server(settings)
}

fn server_delete(daemon: &Arc<Daemon>, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["force"])?;
    let name = arguments.word(0, "the server's name")?;
    let server = server(daemon, name)?;
    let busy = || server.clients().is_some_and(|(_, clients)| !clients.is_empty());
    if arguments.option("force").is_none() && busy() {
        return Err(format!("server {name} has active clients"));
    }
    server.end();
    daemon.inner().servers.retain(|other| other.name() != name);
    Ok(String::new())
}

/// "At least one option flag is required."
fn set_limits(server: &Server, namespace: &str, arguments: &Arguments<'_>) -> Result<String> {
    let mut changed =
        lock(&server.settings).namespaces.get(namespace).cloned().ok_or_else(|| no_namespace(namespace))?;
    if !limits(&mut changed, arguments)? {
        return Err("at least one limit must be given".into());
    }
    server.configure(|settings| {
        settings.namespaces.insert(namespace.to_owned(), changed);
    });
    Ok(String::new())
}

/// Takes limits over; whether there was one.
fn limits(limits: &mut Limits, arguments: &Arguments<'_>) -> Result<bool> {
    let mut any = false;
    if let Some(text) = arguments.option("pinned-memory-limit") {
        let bytes = parse_bytes(text, true)
            .ok_or_else(|| format!("{text} is no memory limit, such as 4G or 512M"))?;
        limits.pinned = vec![(None, bytes)];
        any = true;
    }
    if let Some(text) = arguments.option("active-thread-percentage") {
        let percentage: Option<f64> = text.parse().ok().filter(|value| (1.0..=100.0).contains(value));
        limits.percentage = Some(percentage.ok_or_else(|| format!("{text} is no percentage from 1 to 100"))?);
        any = true;
    }
    if let Some(text) = arguments.option("client-priority") {
        let priority: Option<u32> = text.parse().ok().filter(|priority| *priority < 2);
        limits.priority = Some(priority.ok_or_else(|| format!("{text} is no priority: 0 or 1"))?);
        any = true;
    }
    Ok(any)
}

fn namespace_create(daemon: &Daemon, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["server"])?;
    let name = arguments.word(0, "the namespace's name")?;
    check_name(name)?;
    let server = server(daemon, arguments.needed("server")?)?;
    if lock(&server.settings).namespaces.contains_key(name) {
        return Err(format!("there is a namespace {name} already"));
    }
    server.configure(|settings| {
        settings.namespaces.insert(name.to_owned(), Limits::default());
    });
    Ok(String::new())
}

fn namespace_delete(daemon: &Daemon, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["server", "force"])?;
    let name = arguments.word(0, "the namespace's name")?;
    let server = server(daemon, arguments.needed("server")?)?;
    if name == "default" || !lock(&server.settings).namespaces.contains_key(name) {
        return Err(no_namespace(name));
    }
    let (_, clients) = server.clients().unwrap_or_default();
    if arguments.option("force").is_none() && clients.iter().any(|client| client.namespace == name) {
        return Err(format!("namespace {name} has active clients"));
    }
    server.configure(|settings| {
        settings.namespaces.remove(name);
    });
    Ok(String::new())
}

fn device_list(daemon: &Daemon, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["server", "format"])?;
    let of = arguments.option("server");
    let servers =
        all_servers(daemon).into_iter().filter(|server| of.is_none_or(|name| server.name() == name));
    let mut rows = Vec::new();
    for server in servers {
        for (ordinal, device) in server_devices(daemon, &server).iter().enumerate() {
            rows.push(vec![
                ordinal.to_string(),
                server.name(),
                device.pci.clone(),
                device.uuid.clone(),
                device.name.clone(),
                device.sms.to_string(),
                (device.sms / chunk(device.capability)).to_string(),
                "-".into(),
            ]);
        }
    }
    let columns =
        ["Ordinal", "Server", "PCI ID", "Device UUID", "Name", "Total SMs", "Total Chunks", "Attributes"];
    table(arguments, &columns, rows)
}

/// The device of a server that an ordinal or a UUID names.
fn device_of(daemon: &Daemon, server: &Server, name: &str) -> Result<Device> {
    let devices = server_devices(daemon, server);
    find(&devices, name)
        .map(|index| devices[index].clone())
        .ok_or_else(|| format!("there is no device {name}"))
}

fn check_chunks(partitions: &[Partition], device: &Device) -> Result<()> {
    let (used, all) = (used_chunks(partitions, &device.uuid), device.sms / chunk(device.capability));
    if used > all { Err(format!("device {} has {all} chunks, not {used}", device.uuid)) } else { Ok(()) }
}

fn partition_create(daemon: &Daemon, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["server", "device", "chunks", "include-remainder"])?;
    let name = arguments.word(0, "the partition's name")?;
    let server = server(daemon, arguments.needed("server")?)?;
    let device = device_of(daemon, &server, arguments.needed("device")?)?;
    let chunks = arguments.needed("chunks")?;
    let chunks: Option<u32> = chunks.parse().ok().filter(|chunks| *chunks > 0);
    let include_remainder = arguments.option("include-remainder").map_or(Ok(false), boolean)?;
    // "rejected if the target device already has active clients, … or … not enough free chunks"
    if server.clients().is_some_and(|(_, clients)| !clients.is_empty()) {
        return Err(format!("device {} has active clients", device.uuid));
    }
    let id = {
        let mut inner = daemon.inner();
        inner.partitions_made += 1;
        partition_id(3, inner.partitions_made)
    };
    let partition = Partition {
        name: name.to_owned(),
        device: device.uuid.clone(),
        chunks: chunks.ok_or("--chunks= must be a positive integer")?,
        include_remainder,
        id,
    };
    let mut all = lock(&server.settings).partitions.clone();
    if all.iter().any(|other| other.name == name && other.device == device.uuid) {
        return Err(format!("there is a partition {name} already"));
    }
    all.push(partition.clone());
    check_chunks(&all, &device)?;
    server.configure(|settings| settings.partitions = all);
    let sms = partition.sms(&device);
    Ok(match server.state() {
        ServerState::Active => format!(
            "SM partition '{name}' created on device {uuid} (sm-count={sms})\nCUDA_MPS_SM_PARTITION={uuid}/{id}\n",
            uuid = device.uuid,
            id = partition.id
        ),
        _ => format!("SM partition '{name}' configured on device {}\n", device.uuid),
    })
}

fn partition_delete(daemon: &Daemon, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["server", "device"])?;
    let name = arguments.word(0, "the partition's name")?;
    let server = server(daemon, arguments.needed("server")?)?;
    let device = device_of(daemon, &server, arguments.needed("device")?)?;
    let is = |partition: &Partition| partition.name == name && partition.device == device.uuid;
    let id = lock(&server.settings).partitions.iter().find(|p| is(p)).map(|partition| partition.id.clone());
    let id = id.ok_or_else(|| format!("there is no partition {name}"))?;
    let (_, clients) = server.clients().unwrap_or_default();
    if clients.iter().any(|client| client.partition.as_ref() == Some(&id)) {
        return Err(format!("partition {name} has active clients"));
    }
    server.configure(|settings| settings.partitions.retain(|partition| !is(partition)));
    Ok(format!("SM partition '{name}' deleted from device {}\n", device.uuid))
}

fn partition_list(daemon: &Daemon, arguments: &Arguments<'_>) -> Result<String> {
    arguments.only(&["server", "device", "all", "format"])?;
    let of = arguments.option("server");
    let mut rows = Vec::new();
    for server in all_servers(daemon).into_iter().filter(|server| of.is_none_or(|name| server.name() == name))
    {
        let partitions = lock(&server.settings).partitions.clone();
        let status = if server.state() == ServerState::Active { "created" } else { "configured" };
        for device in server_devices(daemon, &server) {
            let row = |name: &str, chunks: u32, sms: u32, remainder: &str, status: &str, id: &str| {
                let [chunks, sms] = [chunks, sms].map(|number| number.to_string());
                let cells = [&server.name(), &device.uuid, name, &chunks, &sms, remainder, status, id];
                cells.map(str::to_owned).to_vec()
            };
            let size = chunk(device.capability);
            let mut free = device.sms;
            for partition in partitions.iter().filter(|partition| partition.device == device.uuid) {
                let sms = partition.sms(&device);
                free -= sms;
                let remainder = partition.include_remainder.to_string();
                rows.push(row(&partition.name, partition.chunks, sms, &remainder, status, &partition.id));
            }
            // "Devices with unclaimed capacity also show a synthetic row".
            if free >= size {
                rows.push(row("-", free / size, free, "-", "unallocated", "-"));
            }
        }
    }
    let columns =
        ["SERVER", "DEVICE", "NAME", "CHUNKS", "SM-COUNT", "INCLUDE-REMAINDER", "STATUS", "VISIBLE-UUID"];
    table(arguments, &columns, rows)
}

fn feature(daemon: &Daemon, verb: &str, arguments: &Arguments<'_>) -> Result<String> {
    let mut inner = daemon.inner();
    let features = &mut inner.features;
    match verb {
        "enable" | "disable" => {
            let on = verb == "enable";
            match arguments.word(0, "the feature")? {
                "memacct" => features.memacct.enabled = on,
                "context-share" => features.context_share.enabled = on,
                other => return Err(format!("unknown feature {other}")),
            }
            let evicts = features.memacct.enabled;
            drop(inner);
            for server in daemon.servers() {
                server.configure(|settings| settings.evicts = evicts);
            }
            Ok(String::new())
        }
        "describe" => {
            let state = |on| if on { "enabled (default)" } else { "disabled" };
            let mut rows = vec![
                ("memacct", state(features.memacct.enabled)),
                ("context-share", state(features.context_share.enabled)),
            ];
            if let Some(name) = arguments.words.first() {
                rows.retain(|(feature, _)| feature == name);
            }
            let rows =
                rows.into_iter().map(|(name, state)| [name, state, name, "-"].map(str::to_owned).to_vec());
            table(arguments, &["FEATURE", "STATE", "MODULE", "COVERS"], rows.collect())
        }
        _ => Err(format!("unknown command feature {verb}")),
    }
}
