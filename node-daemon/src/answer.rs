//! Requests to the API server that nobody answers.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;

/// How long a request may take: the API server itself gives up after a minute, and most answers come in milliseconds.
/// kube sets no limit, and TCP takes a quarter of an hour to notice that the other side is gone.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Gives a request up that is not answered within `limit`.
pub async fn within<T>(limit: Duration, request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let late = || kube::Error::Service(format!("no answer within {} s", limit.as_secs()).into());
    timeout(limit, request).await.unwrap_or_else(|_| Err(late()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_without_an_answer_fails() {
        let answered = within(LIMIT, std::future::ready(Ok(1))).await;
        assert_eq!(answered.unwrap(), 1);
        let hanging = within(Duration::ZERO, std::future::pending::<kube::Result<()>>());
        let error = timeout(LIMIT, hanging).await.expect("is given up").unwrap_err();
        assert!(matches!(error, kube::Error::Service(_)), "{error}");
    }
}
