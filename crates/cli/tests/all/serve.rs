//! `delft serve` from outside: it tells where it is, answers there, keeps keys to itself, and ends when it is told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::common::{delft, fed, fixture, status};

/// The response to a GET, as it comes.
fn get(address: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn it_serves_until_it_is_told_to_stop() {
    let model = format!("tiny={}", fixture("llama3"));
    let mut command = delft();
    command.args(["serve", &model, "--port", "0", "--parallel", "1"]).stderr(Stdio::piped());
    let mut child = command.env("DELFT_API_KEY", "k-3141592653").spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.starts_with("serving ")).unwrap();
    let (name, address) = line["serving ".len()..].split_once(" at http://").unwrap();
    assert_eq!(name, "tiny");
    assert!(get(address, "/", "").contains("<title>Delft</title>"));
    assert!(get(address, "/v1/models", "").starts_with("HTTP/1.1 401"));
    let models = get(address, "/v1/models", "Authorization: Bearer k-3141592653\r\n");
    assert!(models.starts_with("HTTP/1.1 200") && models.contains("\"id\":\"tiny\""), "{models}");
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let log: Vec<String> = lines.collect();
    assert!(
        log.iter().any(|line| line.contains(" request ") && line.contains("status=401")),
        "{log:?}"
    );
    assert!(log.iter().any(|line| line.contains(" stopping ")), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("3141592653")), "{log:?}");
}

#[test]
fn what_cannot_be_served_is_told_in_one_line() {
    let model = fixture("llama3");
    let cases: [(&[&str], i32, &str); 4] = [
        (&["--host", "0.0.0.0"], 1, "--api-key-file"),
        (&["--api-key", "two words"], 2, "--api-key"),
        (&["--api-key-file", "/nowhere/keys"], 1, "/nowhere/keys"),
        (&[model.as_str()], 1, "names that differ"),
    ];
    for (flags, code, words) in cases {
        let output = fed(delft().args(["serve", "--port", "0", &model]).args(flags), "");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), code, "{flags:?}: {told}");
        assert!(told.contains(words), "{flags:?}: {told}");
    }
}
