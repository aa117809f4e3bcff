//! What is on record, over HTTP. Records name pods and nodes, so it is on loopback only: who may forward a port into the
//! operator's pod may read them.

use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use tokio::net::TcpListener;

use super::pack::unpack;
use super::{Record, Shelf};

/// Serves until `stop` resolves. A port that cannot be had is logged: nothing else depends on it.
pub async fn serve(port: u16, shelf: Arc<Shelf>, stop: impl Future<Output = ()> + Send + 'static) {
    let app = Router::new()
        .route("/debug/plans", get(list))
        .route("/debug/plans/{number}", get(record))
        .with_state(shelf);
    let served = match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
        Ok(listener) => axum::serve(listener, app).with_graceful_shutdown(stop).await,
        Err(error) => Err(error),
    };
    if let Err(error) = served {
        tracing::warn!(port, %error, "the last plans cannot be read on loopback");
    }
}

async fn list(State(shelf): State<Arc<Shelf>>) -> Response {
    Json(shelf.list()).into_response()
}

async fn record(State(shelf): State<Arc<Shelf>>, Path(number): Path<u64>) -> Response {
    let Some((whole, entry)) = shelf.get(number) else {
        let missing =
            format!("there is no plan {number} on record (any more); /debug/plans lists those there are\n");
        return (StatusCode::NOT_FOUND, missing).into_response();
    };
    // Megabytes of JSON, in a large cluster.
    let read = tokio::task::spawn_blocking(move || -> anyhow::Result<Response> {
        let (snapshot, plan) = unpack(&whole, &entry.body)?;
        let about = format!(
            "plan {} of {}, by kerf-operator {}",
            entry.number,
            entry.time,
            env!("CARGO_PKG_VERSION")
        );
        Ok(Json(Record { about, hash: entry.hash, snapshot, plan }).into_response())
    });
    let answer = read.await.map_err(anyhow::Error::from).flatten();
    answer.unwrap_or_else(|error| {
        let said = format!("plan {number} cannot be read: {error}\n");
        (StatusCode::INTERNAL_SERVER_ERROR, said).into_response()
    })
}
