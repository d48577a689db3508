//! The server over TLS. The certificate in `data/` signs itself and is of use for nothing but this.

mod common;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use common::{Setup, ids, read_response, reply, serve_with};
use server::{Server, Tls};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

fn tls(certificate: &str, key: &str) -> Tls {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    Tls { certificate: data.join(certificate), key: data.join(key) }
}

#[test]
fn a_request_over_tls() {
    let mut setup = Setup { ready: false, ..Setup::default() };
    setup.config.tls = Some(tls("certificate.pem", "key.pem"));
    let trusted = CertificateDer::from_pem_file(&tls("certificate.pem", "").certificate);
    let server = serve_with(reply(ids(" red")), setup);

    let mut roots = RootCertStore::empty();
    roots.add(trusted.expect("a certificate")).expect("a root");
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let config = Arc::new(config);
    let health = || {
        let name = ServerName::try_from("localhost").expect("a name");
        let mut connection = ClientConnection::new(Arc::clone(&config), name).expect("a client");
        let mut socket = server.connect();
        let mut stream = Stream::new(&mut connection, &mut socket);
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("write");
        read_response(&mut stream, false).status
    };
    while health() != 200 {}

    // Someone who does not speak TLS gets no answer, and disturbs nobody.
    let mut plain = server.connect();
    plain.write_all(b"GET /health HTTP/1.1\r\n\r\n").expect("write");
    assert_eq!(health(), 200);
}

#[test]
fn certificates_of_no_use_are_refused() {
    for (certificate, key, why) in [
        ("nothing.pem", "key.pem", "nothing.pem: "),
        ("key.pem", "key.pem", "key.pem: expected a certificate in PEM format, found none"),
        (
            "certificate.pem",
            "certificate.pem",
            "certificate.pem: expected a private key in PEM format, found none",
        ),
    ] {
        let mut config = Setup::default().config;
        config.tls = Some(tls(certificate, key));
        let error = Server::bind(config).err().expect("an error").to_string();
        assert!(error.starts_with("TLS: ") && error.contains(why), "{error}");
    }
}
