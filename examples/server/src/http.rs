//! The requests: `POST /multiply` and `GET /metrics`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt as _;
use highwater::Runtime;
use tokio::net::TcpListener;
use tokio::sync::mpsc::WeakSender;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::engine::{self, Job};
use crate::metrics::Metrics;

/// What the requests share.
pub(crate) struct App {
    runtime: Runtime,
    /// Bytes of a vector.
    bytes: usize,
    timeout: Duration,
    /// Weak, because a connection may outlive the stop of the server.
    queue: WeakSender<Job>,
    metrics: Arc<Metrics>,
}

/// An answer that is not a product.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, message) = self;
        let mut response = (status, message + "\n").into_response();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        response
    }
}

/// Answers requests until `stop`, and then until each request that has begun is answered.
pub(crate) async fn serve(
    listener: TcpListener,
    app: App,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    // An answer leaves at once, also if the client has not acknowledged the one before.
    let listener = listener.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    let limit = DefaultBodyLimit::max(app.bytes);
    let router = Router::new()
        .route("/multiply", post(multiply).layer(limit))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(app));
    axum::serve(listener, router).with_graceful_shutdown(stop).await
}

/// Multiplies the vector of a request by the matrix.
async fn multiply(State(app): State<Arc<App>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    let accepted = app.metrics.accept();
    let response = match app.product(accepted, &headers, body).await {
        Ok(product) => ([(header::CONTENT_TYPE, "application/octet-stream")], product).into_response(),
        Err(refusal) => refusal.into_response(),
    };
    app.metrics.answer(response.status().as_u16(), accepted);
    response
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.render(&app.runtime.statistics());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

impl App {
    pub(crate) fn new(
        runtime: &Runtime,
        size: usize,
        timeout: Duration,
        queue: WeakSender<Job>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { runtime: runtime.clone(), bytes: size * size_of::<f32>(), timeout, queue, metrics }
    }

    async fn product(
        &self,
        accepted: Instant,
        headers: &HeaderMap,
        body: Result<Bytes, BytesRejection>,
    ) -> Result<Bytes, Refusal> {
        let vector =
            body.map_err(|error| Refusal(error.status(), format!("{}; send {} bytes", error.body_text(), self.bytes)))?;
        if vector.len() != self.bytes {
            let message = format!("the vector has {} bytes; send {}, four for each value", vector.len(), self.bytes);
            return Err(Refusal(StatusCode::BAD_REQUEST, message));
        }
        let timeout = timeout_of(headers)?.map_or(self.timeout, |timeout| timeout.min(self.timeout));
        let stopping = || Refusal(StatusCode::SERVICE_UNAVAILABLE, "the server stops; try another one".to_owned());
        let (reply, answer) = oneshot::channel();
        let queue = self.queue.upgrade().ok_or_else(stopping)?;
        // The queue is bounded: more requests would only wait longer than their clients.
        queue.try_send(Job { vector, accepted, reply }).map_err(|error| match error {
            TrySendError::Full(_) => {
                Refusal(StatusCode::TOO_MANY_REQUESTS, "the queue is full; try again later".to_owned())
            }
            TrySendError::Closed(_) => stopping(),
        })?;
        drop(queue);
        // A late request drops its end of the channel. The device may still read and write the memory of its lane.
        let answer = timeout_at(accepted + timeout, answer).await.map_err(|_| {
            Refusal(StatusCode::GATEWAY_TIMEOUT, format!("no answer within {timeout:?}; try again later"))
        })?;
        answer.unwrap_or_else(|_| Err(engine::lost())).map_err(|error| {
            Refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("the device refused the batch: {error}"))
        })
    }
}

/// Returns the time that the client waits, if the request has it.
fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
    let Some(value) = headers.get("timeout-ms") else { return Ok(None) };
    let milliseconds = value.to_str().ok().and_then(|text| text.parse().ok());
    milliseconds.map(|milliseconds| Some(Duration::from_millis(milliseconds))).ok_or_else(|| {
        Refusal(StatusCode::BAD_REQUEST, "the header `timeout-ms` has no number; send milliseconds".to_owned())
    })
}
