//! The commands of the second protocol ("mpsv2-interface").

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use super::control::{Daemon, Server, ServerState, lock};
use super::server::{Order, Partition, Report};
use super::values::{chunk, find, parse_bytes, print_bytes};

type Result = std::result::Result<String, String>;

/// Runs a command and returns what it prints. What is refused is said in the text; the exit status does not tell.
pub fn command(daemon: &Arc<Daemon>, words: &[&str]) -> Result {
    match *words {
        ["get_server_list"] => Ok(lines(daemon.servers().iter().map(|server| server.pid))),
        ["get_server_status", pid] => status(server(daemon, pid)?.as_ref()),
        ["start_server", "-uid", uid] | ["start_server", "-uid", uid, "-mlopart"] => {
            let uid = uid.parse().map_err(|_| format!("Invalid user id {uid}"))?;
            if daemon.servers().iter().any(|server| server.uid() == uid) {
                return Ok(String::new());
            }
            daemon.start_server(daemon.settings(uid)).map(|_| String::new())
        }
        ["shutdown_server", pid] => {
            let server = server(daemon, pid)?;
            std::thread::spawn(move || {
                while server.clients().is_some_and(|(_, clients)| !clients.is_empty()) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                server.end();
            });
            Ok(String::new())
        }
        ["shutdown_server", pid, "-f"] => {
            server(daemon, pid)?.end();
            Ok(String::new())
        }
        ["get_client_list", pid] => {
            let clients = server(daemon, pid)?.clients().ok_or("The server does not answer")?.1;
            Ok(lines(clients.iter().map(|client| client.pid)))
        }
        ["get_device_client_list"] => device_clients(daemon, &daemon.servers()),
        ["get_device_client_list", pid] => device_clients(daemon, &[server(daemon, pid)?]),
        ["ps"] => Ok(ps(daemon, &daemon.servers())),
        ["ps", "-p", pid] => Ok(ps(daemon, &[server(daemon, pid)?])),
        ["terminate_client", server_pid, pid] => {
            let pid = pid.parse().map_err(|_| format!("Invalid PID {pid}"))?;
            match server(daemon, server_pid)?.ask(&Order::Terminate { pid }) {
                // It is known to end with 0 and nothing said.
                Some(Report::Done) => Ok(String::new()),
                _ => Err(format!("Client {pid} not found")),
            }
        }
        ["set_default_active_thread_percentage", value] => {
            let value = percentage(value)?;
            daemon.inner().percentage = Some(value);
            Ok(format!("{value:.1}\n"))
        }
        ["get_default_active_thread_percentage"] => {
            Ok(format!("{:.1}\n", daemon.inner().percentage.unwrap_or(100.0)))
        }
        ["set_active_thread_percentage", pid, value] => {
            let value = percentage(value)?;
            server(daemon, pid)?.configure(|settings| {
                if let Some(limits) = settings.namespaces.get_mut("default") {
                    limits.percentage = Some(value);
                }
            });
            Ok(format!("{value:.1}\n"))
        }
        ["get_active_thread_percentage", pid] => {
            let server = server(daemon, pid)?;
            let settings = lock(&server.settings);
            let set = settings.namespaces.get("default").and_then(|limits| limits.percentage);
            Ok(format!("{:.1}\n", set.unwrap_or(100.0)))
        }
        // "The dev argument is not validated": a wrong one is ignored when the server starts.
        ["set_default_device_pinned_mem_limit", device, value] => {
            let bytes = limit(value)?;
            let mut inner = daemon.inner();
            inner.pinned.retain(|(name, _)| name.as_deref() != Some(device));
            inner.pinned.push((Some(device.to_owned()), bytes));
            Ok(String::new())
        }
        // "does not translate between device UUIDs or ordinals"
        ["get_default_device_pinned_mem_limit", device] => Ok(pinned(&daemon.inner().pinned, device)),
        ["set_device_pinned_mem_limit", pid, device, value] => {
            let bytes = limit(value)?;
            server(daemon, pid)?.configure(|settings| {
                if let Some(limits) = settings.namespaces.get_mut("default") {
                    limits.pinned.retain(|(name, _)| name.as_deref() != Some(device));
                    limits.pinned.push((Some(device.to_owned()), bytes));
                }
            });
            Ok(String::new())
        }
        ["get_device_pinned_mem_limit", pid, device] => {
            let server = server(daemon, pid)?;
            let settings = lock(&server.settings);
            let limits = settings.namespaces.get("default").map(|limits| limits.pinned.as_slice());
            Ok(pinned(limits.unwrap_or_default(), device))
        }
        ["set_default_client_priority", value @ ("0" | "1")] => {
            daemon.inner().priority = u32::from(value == "1");
            Ok(String::new())
        }
        ["get_default_client_priority"] => Ok(format!("{}\n", daemon.inner().priority)),
        ["device_query", ..] => Ok(device_query(daemon, words.contains(&"--csv"))),
        ["sm_partition", "add", device, chunks] => add_partition(daemon, device, chunks),
        ["sm_partition", "rm", device, id] => remove_partition(daemon, device, id),
        ["lspart"] => Ok(list_partitions(daemon)),
        ["quit"] => daemon.quit(false, None),
        ["quit", "-t", seconds] => {
            let seconds = seconds.parse().map_err(|_| format!("Invalid timeout {seconds}"))?;
            daemon.quit(false, Some(Duration::from_secs(seconds)))
        }
        _ => Err(format!("Unrecognized command: {}", words.join(" "))),
    }
}

fn server(daemon: &Daemon, pid: &str) -> std::result::Result<Arc<Server>, String> {
    let number: u32 = pid.parse().map_err(|_| format!("Invalid PID {pid}"))?;
    let found = daemon.servers().into_iter().find(|server| server.pid == number);
    found.ok_or_else(|| format!("Server {pid} not found"))
}

fn status(server: &Server) -> Result {
    Ok(match server.state() {
        ServerState::Initializing => "INITIALIZING\n".into(),
        ServerState::Exited => return Err(format!("Server {} not found", server.pid)),
        ServerState::Active => match server.clients() {
            Some((true, _)) => "FAULT\n".into(),
            Some((false, _)) => "ACTIVE\n".into(),
            None => return Err(format!("Server {} not found", server.pid)),
        },
    })
}

fn lines(numbers: impl Iterator<Item = u32>) -> String {
    numbers.map(|number| format!("{number}\n")).collect()
}

fn percentage(text: &str) -> std::result::Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("Invalid percentage {text}"))?;
    if value > 0.0 && value <= 100.0 { Ok(value) } else { Err(format!("Invalid percentage {text}")) }
}

fn limit(text: &str) -> std::result::Result<u64, String> {
    parse_bytes(text, false).ok_or_else(|| format!("Invalid limit {text}: an integer followed by G or M"))
}

fn pinned(limits: &[super::Limit], device: &str) -> String {
    let found = limits.iter().rev().find(|(name, _)| name.as_deref() == Some(device));
    found.map_or_else(|| "No limit set\n".into(), |(_, bytes)| format!("{}\n", print_bytes(*bytes)))
}

fn short(uuid: &str) -> &str {
    uuid.get(..12).unwrap_or(uuid)
}

fn ps(daemon: &Daemon, servers: &[Arc<Server>]) -> String {
    let mut text =
        format!("{:<9} {:<5} {:<9} {:<18} {:<11} COMMAND\n", "PID", "ID", "SERVER", "DEVICE", "NAMESPACE");
    for server in servers {
        for client in server.clients().map(|(_, clients)| clients).unwrap_or_default() {
            for device in &daemon.devices {
                let _ = writeln!(
                    text,
                    "{:<9} {:<5} {:<9} {:<18} {:<11} {}",
                    client.pid,
                    client.number,
                    server.pid,
                    short(&device.uuid),
                    client.linux_ns,
                    client.command
                );
            }
        }
    }
    text
}

fn device_clients(daemon: &Daemon, servers: &[Arc<Server>]) -> Result {
    let mut text = String::new();
    for device in &daemon.devices {
        let clients = servers.iter().filter_map(|server| server.clients()).flat_map(|(_, clients)| clients);
        let pids: Vec<String> = clients.map(|client| client.pid.to_string()).collect();
        let _ = writeln!(text, "{}: {}", device.uuid, pids.join(" "));
    }
    Ok(text)
}

fn device_query(daemon: &Daemon, csv: bool) -> String {
    let gap = if csv { "," } else { "  " };
    let mut text = ["Ordinal", "PCI ID", "UUID", "Name", "Attributes"].join(gap) + "\n";
    for (ordinal, device) in daemon.devices.iter().enumerate() {
        let row = [&ordinal.to_string(), &device.pci, &device.uuid, &device.name, "-"];
        text += &(row.join(gap) + "\n");
    }
    text
}

fn device(daemon: &Daemon, name: &str) -> std::result::Result<usize, String> {
    find(&daemon.devices, name).ok_or_else(|| format!("Device {name} not found"))
}

/// "Using Static SM Partitioning": chunks of a device are given to one partition each.
fn add_partition(daemon: &Daemon, name: &str, chunks: &str) -> Result {
    if !daemon.static_partitions {
        return Err("Static partitioning is not enabled".into());
    }
    let device = &daemon.devices[device(daemon, name)?];
    let chunks: u32 = chunks
        .parse()
        .ok()
        .filter(|chunks| *chunks > 0)
        .ok_or_else(|| format!("Invalid number of chunks {chunks}"))?;
    let mut inner = daemon.inner();
    let used: u32 = used_chunks(&inner.partitions, &device.uuid);
    let all = device.sms / chunk(device.capability);
    if used + chunks > all {
        return Err(format!("Not enough free chunks: {} of {all}", all - used));
    }
    inner.partitions_made += 1;
    let id = partition_id(2, inner.partitions_made);
    let partition = Partition {
        name: id.clone(),
        device: device.uuid.clone(),
        chunks,
        include_remainder: false,
        id: id.clone(),
    };
    inner.partitions.push(partition);
    tell_partitions(daemon, inner);
    // r615's documentation prints the id alone; users of earlier drivers report a sentence.
    Ok(match daemon.branch {
        615.. => format!("{}/{id}\n", device.uuid),
        _ => format!("Partition {}/{id} created\n", device.uuid),
    })
}

fn remove_partition(daemon: &Daemon, name: &str, id: &str) -> Result {
    let device = daemon.devices[device(daemon, name)?].uuid.clone();
    let used = |client: &super::server::ClientInfo| client.partition.as_deref() == Some(id);
    let mut clients = daemon.servers().into_iter().filter_map(|server| server.clients());
    if clients.any(|(_, clients)| clients.iter().any(used)) {
        return Err(format!("Partition {id} is in use"));
    }
    let mut inner = daemon.inner();
    let before = inner.partitions.len();
    inner.partitions.retain(|partition| partition.device != device || partition.id != id);
    if inner.partitions.len() == before {
        return Err(format!("Partition {id} not found"));
    }
    tell_partitions(daemon, inner);
    Ok(String::new())
}

fn tell_partitions(daemon: &Daemon, inner: std::sync::MutexGuard<'_, super::control::Inner>) {
    let partitions = inner.partitions.clone();
    drop(inner);
    for server in daemon.servers() {
        server.configure(|settings| settings.partitions = partitions.clone());
    }
}

pub fn used_chunks(partitions: &[Partition], device: &str) -> u32 {
    partitions.iter().filter(|partition| partition.device == device).map(|partition| partition.chunks).sum()
}

/// An opaque name of 36 letters, which begins differently in either protocol.
pub fn partition_id(protocol: u32, nth: u32) -> String {
    let digits = crate::uuid::derived("sm partition", &format!("{protocol}/{nth}")).replace('-', "");
    format!("{}{}{}", if protocol == 3 { "K" } else { "D" }, &digits[..6], "A".repeat(29))
}

fn list_partitions(daemon: &Daemon) -> String {
    let mut text =
        "GPU           Partition                             free   used   free   used   clients\n\
                    \u{20}                                                   chunk  chunk  SM     SM\n"
            .to_owned();
    let inner = daemon.inner();
    let partitions = inner.partitions.clone();
    drop(inner);
    let clients: Vec<_> = daemon
        .servers()
        .iter()
        .filter_map(|server| server.clients())
        .flat_map(|(_, clients)| clients)
        .collect();
    for device in &daemon.devices {
        let size = chunk(device.capability);
        let (all, used) = (device.sms / size, used_chunks(&partitions, &device.uuid));
        let mut row = |id: &str, free: &str, used: u32, free_sms: &str, used_sms: u32, clients: &str| {
            let gpu = short(&device.uuid);
            let _ = writeln!(
                text,
                "{gpu:<13} {id:<37} {free:<6} {used:<6} {free_sms:<6} {used_sms:<6} {clients}"
            );
        };
        let free = all - used;
        row("-", &free.to_string(), used, &(device.sms - used * size).to_string(), used * size, "-");
        for partition in partitions.iter().filter(|partition| partition.device == device.uuid) {
            let taken = clients.iter().any(|client| client.partition.as_ref() == Some(&partition.id));
            let taken = if taken { "Yes" } else { "-" };
            row(&partition.id, "-", partition.chunks, "-", partition.chunks * size, taken);
        }
    }
    text
}
