//! Stands between a component and the API server, and stops a chosen write just before or just after it takes effect:
//! the moments at which a crash of the component leaves something half done.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A body that the proxy reads whole is no larger.
const MAX_BODY: usize = 8 << 20;

/// On which side of its effect a write is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The API server never sees it.
    Before,
    /// It has taken effect; the answer never comes.
    After,
}

/// The writes that a fault is about.
#[derive(Clone, Debug)]
pub struct Matching {
    pub method: Method,
    /// Contained in the path.
    pub path: &'static str,
    /// The path's last part, where it matters.
    pub ends_with: &'static str,
    /// Contained in the body, where it matters.
    pub body: Option<&'static str>,
}

impl Matching {
    fn holds(&self, method: &Method, path: &str, body: &[u8]) -> bool {
        *method == self.method
            && path.contains(self.path)
            && path.ends_with(self.ends_with)
            && self.body.is_none_or(|text| String::from_utf8_lossy(body).contains(text))
    }
}

#[derive(Clone)]
struct Shared {
    client: Client,
    fault: Arc<Mutex<Option<(Matching, Side)>>>,
    stopped: mpsc::UnboundedSender<String>,
}

/// A running proxy; it ends when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    fault: Arc<Mutex<Option<(Matching, Side)>>>,
    stops: mpsc::UnboundedReceiver<String>,
    server: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Proxy {
    /// Forwards to the API server as `client`, whoever asks.
    ///
    /// # Errors
    /// No port of loopback is free.
    pub async fn start(client: Client) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("failed to listen on loopback")?;
        let address = listener.local_addr()?;
        let fault = Arc::new(Mutex::new(None));
        let (stopped, stops) = mpsc::unbounded_channel();
        let shared = Shared { client, fault: fault.clone(), stopped };
        let app = Router::new().fallback(forward).with_state(shared);
        let server = tokio::spawn(async move {
            // It ends with the proxy.
            let _ = axum::serve(listener, app).await;
        });
        Ok(Self { address, fault, stops, server })
    }

    /// Where it listens, as the `server` of a kubeconfig.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stops the next write that matches.
    pub fn stop_next(&self, matching: Matching, side: Side) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some((matching, side));
    }

    /// Waits until a write was stopped, and says which. Its sender waits for an answer that never comes.
    pub async fn stopped(&mut self) -> Option<String> {
        self.stops.recv().await
    }
}

async fn forward(State(shared): State<Shared>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, MAX_BODY).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let side = {
        let mut fault = shared.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let hit = fault
            .as_ref()
            .is_some_and(|(matching, _)| matching.holds(&parts.method, parts.uri.path(), &body));
        if hit { fault.take().map(|(_, side)| side) } else { None }
    };
    let what = format!("{} {}", parts.method, parts.uri.path());
    if side == Some(Side::Before) {
        let _ = shared.stopped.send(what);
        return std::future::pending().await;
    }
    for header in [header::HOST, header::CONTENT_LENGTH, header::AUTHORIZATION, header::CONNECTION] {
        parts.headers.remove(header);
    }
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let mut forwarded = axum::http::Request::builder().method(parts.method).uri(path);
    if let Some(headers) = forwarded.headers_mut() {
        *headers = parts.headers;
    }
    let answer = match forwarded.body(kube::client::Body::from(body.to_vec())) {
        Ok(request) => shared.client.send(request).await,
        Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    };
    if side == Some(Side::After) {
        let _ = shared.stopped.send(what);
        return std::future::pending().await;
    }
    match answer {
        Ok(response) => {
            let (parts, body) = response.into_parts();
            Response::from_parts(parts, Body::new(body))
        }
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}
