//! The metrics over HTTP. Whoever reaches the address is answered, and may not cost the daemon more than a few
//! descriptors: kubelet needs it.

use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::encoding::prometheus_text;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::scrape;
use crate::node::NodeState;

/// Connections at a time.
const CONNECTIONS: usize = 8;

/// How long one may take, from its beginning to its end.
const PATIENCE: Duration = Duration::from_secs(10);

const FORMAT: HeaderValue = HeaderValue::from_static(prometheus_text::CONTENT_TYPE);

/// Where to listen: the first of these that can be had; nowhere if there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Address(Vec<SocketAddr>);

impl Address {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let wrong =
            || format!("'{text}' is no address to listen at: write ip:port, or :port for all of the node's");
        match text.strip_prefix(':') {
            Some(port) => {
                let port: u16 = port.parse().map_err(|_| wrong())?;
                // The first one takes both kinds, where there is IPv6.
                Ok(Self(vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]))
            }
            None => Ok(Self(vec![text.parse().map_err(|_| wrong())?])),
        }
    }
}

/// Serves until dropped.
pub async fn serve(address: &Address, state: NodeState) -> anyhow::Result<()> {
    let listener = TcpListener::bind(&address.0[..])
        .await
        .with_context(|| format!("failed to listen for scrapes at {}", address.0[0]))?;
    tracing::info!(address = %listener.local_addr()?, "metrics are at /metrics");
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = room.clone().acquire_owned().await?;
        let (stream, _) = listener.accept().await?;
        let state = state.clone();
        tokio::spawn(async move {
            let _ = timeout(PATIENCE, answer(stream, state)).await;
            drop(place);
        });
    }
}

/// One request to a connection.
async fn answer(stream: TcpStream, state: NodeState) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(respond(&request, &state)) }
    });
    http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service).await
}

fn respond(request: &Request<Incoming>, state: &NodeState) -> Response<Full<Bytes>> {
    let plain = |status: StatusCode, text: String| {
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "metrics are at /metrics\n".to_owned());
    }
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "GET only\n".to_owned());
    }
    match scrape(state) {
        Ok(text) => {
            let mut response = plain(StatusCode::OK, text);
            response.headers_mut().insert(CONTENT_TYPE, FORMAT);
            response
        }
        Err(error) => {
            plain(StatusCode::INTERNAL_SERVER_ERROR, format!("the metrics cannot be written: {error}\n"))
        }
    }
}
