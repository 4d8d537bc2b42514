//! The listening socket: connections with limits on what they may cost, and an orderly end.
//!
//! HTTP/1.1 without encryption: where that is needed, a proxy in front adds it.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use delft::{Adapter, Error, Result};
use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

use crate::catalogue::{Catalogue, now};
use crate::gate::{AccessRules, Peer, is_origin};
use crate::generation::GenerationLimits;
use crate::library::Library;
use crate::log::Line;
use crate::metrics::Requests;
use crate::models::Served;
use crate::openai::stored::Stored;
use crate::router::{App, PARTS, router};
use crate::sessions::Sessions;
use crate::task::{self, Task};
use crate::watch::Record;

/// Connections that are open at a time; more wait until one is closed.
const CONNECTIONS: usize = 512;
/// The longest that the head of a request may take to arrive, and that a connection may idle before
/// it.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// The longest that a client may leave what is sent to it unread.
const WRITE_TIME: Duration = Duration::from_secs(60);
/// Largest head of a request, in bytes.
const LARGEST_HEAD: usize = 64 << 10;

/// Where and how to serve.
#[derive(Clone)]
pub struct ServerConfig {
    /// Address and port; port 0 is one of the system's choosing.
    pub address: SocketAddr,
    /// Who may ask.
    pub access: AccessRules,
    /// Allows an address that other machines reach without asking them for a key.
    pub insecure: bool,
    /// Bounds on what runs and waits, for each model.
    pub limits: GenerationLimits,
    /// How long requests may go on after the first signal to stop.
    pub drain: Duration,
    /// The models that are loaded when a request names them.
    pub library: Library,
    /// A folder for files to which requests and answers are added, for `delft replay`.
    pub record: Option<PathBuf>,
    /// A folder in which administrators may save sessions; unset: none are saved.
    pub sessions: Option<PathBuf>,
}

impl ServerConfig {
    /// Checks what can be checked before models are loaded.
    ///
    /// # Errors
    /// An address that other machines reach while no key is asked for; an allowed origin that is
    /// none.
    pub fn check(&self) -> Result<()> {
        if let Some(odd) = self.access.origins.iter().find(|origin| !is_origin(origin)) {
            let expected = "an origin as browsers send it, such as https://example.com";
            return Err(Error::new("origins", expected, format!("{odd:?}")));
        }
        let ip = self.address.ip();
        if ip.is_loopback() || self.insecure || !self.access.keys.is_empty() {
            return Ok(());
        }
        let error = Error::new("address", "127.0.0.1, or a key that others must have", ip);
        Err(error.hint("give a key, or say that everyone may ask"))
    }

    /// Looks whether the address can be taken, before models are loaded for it.
    ///
    /// # Errors
    /// An address that is in use, or none of this machine.
    pub fn check_address(&self) -> Result<()> {
        listen(self.address).map(drop)
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|e| Error::io(address, e).hint("take another port"))
}

/// Models behind a socket.
pub struct Server {
    listener: TcpListener,
    app: Arc<App>,
    drain: Duration,
}

impl Server {
    /// Takes the address. Models that are loaded and that the configuration's library names as well
    /// may be unloaded and loaded again; others stay.
    ///
    /// # Errors
    /// An address that is in use, or that other machines reach while no key is asked for; two
    /// models of one name; a chat template that cannot be read; a folder for records that cannot be
    /// written to.
    pub fn bind(config: ServerConfig, models: Vec<Served>) -> Result<Server> {
        config.check()?;
        let ServerConfig { address, access, limits, drain, library, record, sessions, .. } = config;
        let models = Arc::new(Catalogue::new(library, models, limits)?);
        let record = record.as_deref().map(Record::begin).transpose()?;
        let listener = listen(address)?;
        listener.set_nonblocking(true).map_err(|e| Error::io(address, e))?;
        let app = App {
            models,
            access,
            record,
            requests: Requests::default(),
            sessions: Sessions::begin(sessions)?,
            responses: Stored::default(),
            parts: Semaphore::new(PARTS),
            summaries: Mutex::default(),
            created: now(),
        };
        Ok(Server { listener, app: Arc::new(app), drain })
    }

    /// The address, with the port that was chosen.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::io("the socket", e))
    }

    /// The handle by which adapters of its models change while it serves.
    pub fn adapted(&self) -> Adapted {
        Adapted(self.app.models.clone())
    }

    /// Serves until SIGTERM, SIGINT or Ctrl-C: the first lets requests finish within the limit, the
    /// second ends at once. Calls `ready` when it heeds signals and is about to answer.
    ///
    /// # Errors
    /// A system without the threads or sockets that serving takes.
    pub fn run(self, ready: impl FnOnce()) -> Result<()> {
        let runtime = runtime()?;
        let outcome = runtime.block_on(async {
            let mut signals = Signals::listen()?;
            ready();
            let (stop, stopped) = tokio::sync::oneshot::channel();
            let second = task::spawn(async move {
                signals.next().await;
                // A server that has ended already needs no telling.
                let _ = stop.send(());
                signals.next().await;
            });
            self.run_until(Box::pin(ended(stopped)), Box::pin(ended(second))).await
        });
        runtime.shutdown_background();
        outcome
    }

    /// Serves on a thread of its own, until the handle stops it.
    ///
    /// # Errors
    /// As [`Server::run`].
    pub fn spawn(self) -> Result<Running> {
        let address = self.address()?;
        let runtime = runtime()?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let (stop, never) = (Box::pin(ended(stopped)), Box::pin(std::future::pending()));
            let outcome = runtime.block_on(self.run_until(stop, never));
            runtime.shutdown_background();
            outcome
        });
        Ok(Running { address, stop, thread })
    }

    /// Serves until `stop`; then lets requests finish, within the limit or until `at_once`.
    async fn run_until(self, mut stop: Task, at_once: Task) -> Result<()> {
        let Server { listener, app, drain } = self;
        let listener = tokio::net::TcpListener::from_std(listener);
        let listener = listener.map_err(|e| Error::io("the socket", e))?;
        let (models, router) = (app.models.clone(), router(app));
        let idle = task::spawn(models.clone().unload_idle());
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(LARGEST_HEAD);
        let connections = Arc::new(Semaphore::new(CONNECTIONS));
        let graceful = GracefulShutdown::new();
        loop {
            let accepted = async {
                let permit = connections.clone().acquire_owned().await;
                (permit, listener.accept().await)
            };
            let (permit, (stream, peer)) = tokio::select! {
                () = &mut stop => break,
                (permit, accepted) = accepted => match accepted {
                    Ok((stream, peer)) => (permit, (stream, Peer(peer.ip()))),
                    Err(_) => {
                        // The process has no file descriptors left, or the client is gone already:
                        // others go on.
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                },
            };
            // Events are small, and shall not wait for each other.
            let _ = stream.set_nodelay(true);
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(WRITE_TIME));
            let io = TokioIo::new(Box::pin(stream));
            let service = router.clone().map_request(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(peer);
                request
            });
            let service = TowerToHyperService::new(service);
            let connection = graceful.watch(http.serve_connection(io, service));
            task::spawn(async move {
                // A connection that breaks is its client's affair.
                let _ = connection.await;
                drop(permit);
            });
        }
        models.stop_soon();
        drop(listener);
        idle.abort();
        Line::about("stopping").with("open", graceful.count()).write();
        tokio::select! {
            () = graceful.shutdown() => {}
            () = tokio::time::sleep(drain) => Line::about("stopped").with("late", true).write(),
            () = at_once => Line::about("stopped").with("signal", 2).write(),
        }
        Ok(())
    }
}

/// The adapters of a server's models, while it serves.
#[derive(Clone)]
pub struct Adapted(Arc<Catalogue>);

impl Adapted {
    /// Puts an adapter, with its handle on each of the model's engines, behind a name of its own
    /// beside the loaded model `of`, in the place of the one of that name. Requests that are under
    /// way keep the one that they began with.
    ///
    /// # Errors
    /// A model that is not loaded; a name that another model has.
    pub fn put(&self, of: &str, name: &str, adapters: Vec<Adapter>) -> Result<()> {
        self.0.put(of, name, adapters)
    }
}

/// Waits until a future has an outcome, whatever it is.
async fn ended<T>(future: impl Future<Output = T>) {
    future.await;
}

/// A server on a thread of its own.
pub struct Running {
    address: SocketAddr,
    stop: tokio::sync::oneshot::Sender<()>,
    thread: std::thread::JoinHandle<Result<()>>,
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets requests finish, within the limit, and ends.
    ///
    /// # Errors
    /// As [`Server::run`].
    pub fn stop(self) -> Result<()> {
        let Running { stop, thread, .. } = self;
        drop(stop);
        thread.join().unwrap_or_else(|_| Err(Error::new("the server", "", "its thread panicked")))
    }
}

/// Threads for requests; models compute on threads of their own.
fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(2).thread_name("delft-http").enable_all();
    builder.build().map_err(|e| Error::io("threads to serve with", e))
}

/// Signals that ask a server to stop.
struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    fn listen() -> Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).map_err(|e| Error::io("signals", e));
        let interrupt = listen(SignalKind::interrupt())?;
        Ok(Signals { interrupt, terminate: listen(SignalKind::terminate())? })
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    #[cfg(not(unix))]
    fn listen() -> Result<Signals> {
        Ok(Signals {})
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        // Where it cannot be listened to, the system ends the program.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
