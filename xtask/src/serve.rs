//! `cargo xtask demo --serve`: the OpenAI-compatible server with the SmolLM2 pair, and a request to try.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::{bench, host, model, process};

/// The hidden subcommand that watches for the server to come up.
pub const WATCH: &str = "watch-server";
const REQUEST: &str = r#"{"model": "default", "max_tokens": 128, "temperature": 0, "messages": [{"role": "user", "content": "List five fruits."}]}"#;
const TIMEOUT: Duration = Duration::from_secs(2);

pub fn serve(root: &Path, port: u16, rest: &[String]) -> Result<()> {
    host::set_up(root, false)?;
    let target = model::set_up(root, None, false)?.hf;
    let program = bench::build(root, "mistralrs")?;
    // Otherwise another program on that port would pass for our server.
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .with_context(|| format!("port {port} is not free: choose another with --port"))?;

    // The watcher is the child and the server takes over this process, so Ctrl-C and kill reach the server itself.
    let own = std::env::current_exe().context("cannot find xtask's own program")?;
    process::command(own)
        .args([WATCH, &port.to_string(), &std::process::id().to_string()])
        .stdin(Stdio::null())
        .spawn()
        .context("cannot start the watcher")?;
    let mut server = process::command(program);
    server
        .args([
            "serve",
            "--port",
            &port.to_string(),
            "--host",
            "127.0.0.1",
            "--cpu",
            "--dtype",
            "f32",
            "-m",
        ])
        .arg(target)
        .args(["--speculative", "dflash", "--speculative-draft-model"])
        .arg(root.join(bench::DRAFT))
        .args(rest);
    process::exec(&mut server)
}

/// Waits until the server answers, then prints a request to try. Ends quietly if the server, its parent, ends first.
pub fn watch(port: u16, server: u32) {
    while !is_healthy(port) {
        if !is_parent(server) {
            return;
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    println!(
        "\nReady. Try, in another terminal:\n\n  \
         curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \
         -d '{REQUEST}'\n\nCtrl-C stops the server.\n"
    );
}

#[cfg(unix)]
fn is_parent(process: u32) -> bool {
    std::os::unix::process::parent_id() == process
}

#[cfg(not(unix))]
fn is_parent(_process: u32) -> bool {
    true
}

fn is_healthy(port: u16) -> bool {
    get_health(port).is_ok_and(|head| is_ok(&head))
}

fn get_health(port: u16) -> std::io::Result<String> {
    let mut stream =
        TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut head = [0; 64];
    let n = stream.read(&mut head)?;
    Ok(String::from_utf8_lossy(&head[..n]).into_owned())
}

fn is_ok(response: &str) -> bool {
    response.starts_with("HTTP/") && response.split(' ').nth(1) == Some("200")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_status_200_counts_as_healthy() {
        assert!(is_ok("HTTP/1.1 200 OK\r\n"));
        assert!(!is_ok("HTTP/1.1 503 Service Unavailable\r\n"));
        assert!(!is_ok("SSH-2.0-x 200"));
        assert!(!is_ok(""));
    }

    #[test]
    fn a_server_that_answers_is_seen_and_a_closed_port_is_not() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 256];
            let n = stream.read(&mut request).unwrap();
            assert!(request[..n].starts_with(b"GET /health "));
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        });
        assert!(is_healthy(port));
        server.join().unwrap();
        assert!(!is_healthy(port));
    }
}
