//! Unix sockets that kubelet and containers' hooks find.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Router;

/// Longest path of a socket on Linux: `sun_path` less its final zero.
const MAX_PATH: usize = 107;

/// How often a socket's file is looked for.
const LOOK: Duration = Duration::from_secs(10);

/// Serves on `path` until `stop` says so. What an earlier process left there is replaced; when the file is removed, it
/// is made again. A file that another process put in its place is left to that one.
pub async fn serve(
    path: PathBuf,
    router: impl Fn() -> Router,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut servers = JoinSet::new();
    loop {
        let incoming = UnixListenerStream::new(bind(&path)?);
        let mut end = stop.clone();
        let router = router();
        servers.spawn(async move {
            router.serve_with_incoming_shutdown(incoming, async move { stopped(&mut end).await }).await
        });
        loop {
            tokio::select! {
                // First: a server that was told to stop ends too, and that is no failure.
                biased;
                () = stopped(&mut stop) => {
                    while servers.join_next().await.is_some() {}
                    return Ok(());
                }
                Some(ended) = servers.join_next() => {
                    let why = match ended {
                        Ok(Ok(())) => "it stopped".to_owned(),
                        Ok(Err(error)) => error.to_string(),
                        Err(error) => error.to_string(),
                    };
                    return Err(io::Error::other(format!("the server on {} ended: {why}", path.display())));
                }
                () = tokio::time::sleep(LOOK) => if !path.exists() { break },
            }
        }
        tracing::warn!(socket = %path.display(), "the socket was removed; making it again");
    }
}

/// Resolves when `stop` is true, or nobody can make it so any more.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    _ = stop.wait_for(|stop| *stop).await;
}

/// Listens at `path`, in place of a socket that an earlier process left there.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let named = |what: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
    };
    if path.as_os_str().len() > MAX_PATH {
        let message = format!("a socket's path has at most {MAX_PATH} bytes; choose a shorter directory");
        return Err(named("listen on", io::Error::new(io::ErrorKind::InvalidInput, message)));
    }
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(|error| named("make the directory of", error))?;
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            std::fs::remove_file(path).map_err(|error| named("replace", error))?;
        }
        Ok(_) => {
            let error = io::Error::new(io::ErrorKind::AlreadyExists, "something that is no socket is there");
            return Err(named("listen on", error));
        }
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(|error| named("listen on", error))?;
    // kubelet and container runtimes run as root, and nobody else has business here.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|error| named("set the mode of", error))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use tonic::transport::Server;

    use super::*;
    use crate::node::NodeState;
    use crate::plugin::proto::registration::registration_server::RegistrationServer;
    use crate::plugin::registration::RegistrationService;
    use crate::prepared::PreparedClaims;

    #[tokio::test]
    async fn stale_sockets_are_replaced_and_other_files_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plugins/x.sock");
        drop(bind(&path).unwrap());
        bind(&path).expect("left by a process that is gone");

        let file = directory.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(bind(&file).unwrap_err().to_string().contains("no socket"));
        let long = directory.path().join("x".repeat(120));
        assert!(bind(&long).unwrap_err().to_string().contains("107"), "says what is possible");
    }

    #[tokio::test]
    async fn being_told_to_stop_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        // Often, since the server and its keeper hear of it in no particular order.
        for _ in 0..64 {
            let (stop, stopped) = watch::channel(false);
            let state = NodeState::new("n", PreparedClaims::new());
            let service = RegistrationService { state, endpoint: path.clone() };
            let router = move || Server::builder().add_service(RegistrationServer::new(service.clone()));
            let server = tokio::spawn(serve(path.clone(), router, stopped));
            while !path.exists() {
                tokio::task::yield_now().await;
            }
            tokio::task::yield_now().await;
            stop.send_replace(true);
            server.await.unwrap().unwrap();
            std::fs::remove_file(&path).unwrap();
        }
    }
}
