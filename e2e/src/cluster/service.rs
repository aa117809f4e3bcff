//! The API server for pods with a network of their own, at the address of its Service: the one that kubelet tells them.
//!
//! That address is also the gateway that the CNI plugin gives to pods, so the host's end of a pod's link has it: it is
//! there exactly while such a pod is, and nothing is set up on the host for it.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// The port of the Service `kubernetes`; the API server has no flag for another.
const PORT: u16 = 443;
/// The pause between two looks for the address.
const PAUSE: Duration = Duration::from_millis(100);

/// Passes connections on to the API server's port of loopback, for as long as the future is polled.
pub(super) async fn serve(address: Ipv4Addr, api_port: u16) {
    let listener = loop {
        match TcpListener::bind((address, PORT)).await {
            Ok(listener) => break listener,
            // No pod has started yet.
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => sleep(PAUSE).await,
            Err(error) => {
                eprintln!(
                    "pods with a network of their own cannot reach the API server: {address}:{PORT}: {error}"
                );
                return;
            }
        }
    };
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Ok((mut pod, _)) = listener.accept() => {
                connections.spawn(async move {
                    let mut server = TcpStream::connect(("127.0.0.1", api_port)).await?;
                    copy_bidirectional(&mut pod, &mut server).await
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}
