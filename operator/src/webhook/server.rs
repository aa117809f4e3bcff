//! The HTTPS server.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
    serve::Listener,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc, watch},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig, server::TlsStream};
use tracing::{debug, warn};

use super::{View, WebhookError, review};

/// A pod can be as large as etcd allows, 1.5 MiB, and an update carries it twice.
const MAX_BODY: usize = 8 << 20;
/// A client that takes longer for its handshake is no API server.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at one time. Connections are kept alive, so that an API server makes few.
const MAX_HANDSHAKES: usize = 256;
/// Pause after a failed accept: out of file descriptors passes only with time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The certificate in use; `None` until there is one.
pub(super) type CertificateReceiver = watch::Receiver<Option<Arc<ServerConfig>>>;

pub(super) async fn bind(address: SocketAddr) -> Result<TcpListener, WebhookError> {
    TcpListener::bind(address).await.map_err(|source| WebhookError::Listen { address, source })
}

pub(super) async fn run(
    listener: TcpListener,
    certificate: CertificateReceiver,
    view: Arc<dyn View>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), WebhookError> {
    let address = listener.local_addr().map_err(WebhookError::Serve)?;
    let (sender, ready) = mpsc::channel(MAX_HANDSHAKES);
    let accepting = tokio::spawn(accept(listener, certificate.clone(), sender));
    let app = Router::new()
        .route("/mutate-pods", post(mutate_pods))
        .route("/validate-policies", post(validate_policies))
        .route("/healthz", get(async || "ok"))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(view);
    let served = axum::serve(Handshaken { ready, address }, app).with_graceful_shutdown(shutdown).await;
    accepting.abort();
    served.map_err(WebhookError::Serve)
}

async fn mutate_pods(State(view): State<Arc<dyn View>>, body: Bytes) -> Response {
    answer(review::pod(&body, view.as_ref()))
}

async fn validate_policies(State(view): State<Arc<dyn View>>, body: Bytes) -> Response {
    answer(review::policy(&body, view.as_ref()))
}

fn answer(review: impl serde::Serialize) -> Response {
    (StatusCode::OK, Json(review)).into_response()
}

/// Connections whose handshake is done. The handshakes run side by side: one slow client keeps nobody waiting.
struct Handshaken {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: SocketAddr,
}

impl Listener for Handshaken {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(connection) => connection,
            // Accepting has ended, which only happens as the server shuts down.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}

async fn accept(
    listener: TcpListener,
    mut certificate: CertificateReceiver,
    ready: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "failed to accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(slot) = handshakes.clone().acquire_owned().await else { return };
        let config = match certificate.wait_for(Option::is_some).await {
            Ok(config) => config.clone(),
            Err(_) => return,
        };
        let Some(config) = config else { continue };
        let ready = ready.clone();
        tokio::spawn(async move {
            let _slot = slot;
            match timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await {
                Ok(Ok(stream)) => drop(ready.send((stream, peer)).await),
                Ok(Err(error)) => debug!(%peer, %error, "failed TLS handshake"),
                Err(_) => debug!(%peer, "a TLS handshake took too long"),
            }
        });
    }
}
