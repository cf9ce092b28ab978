//! A client of HTTP/1.1, just enough for the self-test and the tests.

use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// One connection, for one request after another.
pub(crate) struct Client(BufReader<TcpStream>);

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) body: Vec<u8>,
    /// Whether the server closes the connection.
    pub(crate) closes: bool,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a request and returns its answer. Returns `None` if the server closed the connection and sent nothing: it then has not
    /// read the request.
    ///
    /// `start` is the method and the path, and `headers` has lines that end in `\r\n`.
    pub(crate) async fn send(&mut self, start: &str, headers: &str, body: &[u8]) -> Result<Option<Answer>> {
        let head = format!("{start} HTTP/1.1\r\nhost: server\r\n{headers}content-length: {}\r\n\r\n", body.len());
        let request = [head.as_bytes(), body].concat();
        let mut line = String::new();
        let first = match self.0.write_all(&request).await {
            Ok(()) => self.0.read_line(&mut line).await,
            Err(error) => Err(error),
        };
        match first {
            Ok(0) => return Ok(None),
            Err(error) if line.is_empty() && is_closed(&error) => return Ok(None),
            other => other?,
        };
        let malformed = |what: &str| Error::new(ErrorKind::InvalidData, format!("the answer has {what}: {line:?}"));
        let code = line.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| malformed("no code"))?;
        let (mut length, mut closes) = (None, false);
        loop {
            let mut header = String::new();
            if self.0.read_line(&mut header).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let header = header.trim_end().to_ascii_lowercase();
            match header.split_once(": ") {
                Some(("content-length", value)) => length = value.parse().ok(),
                Some(("connection", "close")) => closes = true,
                _ if header.is_empty() => break,
                _ => {}
            }
        }
        let mut body = vec![0; length.ok_or_else(|| malformed("no length"))?];
        self.0.read_exact(&mut body).await?;
        Ok(Some(Answer { code, body, closes }))
    }

    /// Sends a vector and returns the answer, as [`Client::send`] does.
    pub(crate) async fn multiply(&mut self, headers: &str, vector: &[f32]) -> Result<Option<Answer>> {
        self.send("POST /multiply", headers, bytemuck::cast_slice(vector)).await
    }
}

fn is_closed(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted)
}
