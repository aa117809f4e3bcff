//! The webhook's certificate: made, judged and turned into a server's configuration. No I/O here.
//!
//! Every serving certificate has a certificate authority of its own, whose key is thrown away once it has signed: what is
//! trusted can never sign anything else. A change therefore has two steps, so that the API server trusts the new
//! authority before the server shows a certificate of it: first the next certificate is kept beside the current one and
//! both authorities are trusted; later the next becomes the current.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::{ByteString, jiff};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use thiserror::Error;
use tokio_rustls::rustls::{
    self, RootCertStore, ServerConfig,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};

/// How long a certificate is valid.
const LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long before its end a certificate is replaced: an operator that is away for two months loses nothing.
pub(super) const RENEW_BEFORE: Duration = Duration::from_secs(90 * 24 * 3600);

/// Keys of the Secret. The first three are what `kubernetes.io/tls` Secrets use, with the authorities in `ca.crt`.
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// Why a certificate cannot be made or used.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("failed to make a certificate for {names:?}: {source}")]
    Make { names: Vec<String>, source: rcgen::Error },
    #[error("failed to read the date: {0}")]
    Clock(jiff::Error),
    #[error("failed to read the Secret's {key}: {reason}")]
    Read { key: &'static str, reason: String },
    #[error("failed to use certificate and key: {0}")]
    Use(#[from] rustls::Error),
}

/// The content of the Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Material {
    data: BTreeMap<String, Vec<u8>>,
}

/// What to do with the content of the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Serve it.
    Good,
    /// Serve it, but write this, with the next certificate beside the current.
    Prepare(Box<Material>),
    /// Serve it; once its authorities are trusted everywhere, write this, with the next certificate in use.
    Promote(Box<Material>),
    /// It is of no use; write this instead.
    Replace(Box<Material>),
}

impl Material {
    pub(super) fn from_secret(data: Option<&BTreeMap<String, ByteString>>) -> Self {
        let data = data.into_iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect();
        Self { data }
    }

    pub(super) fn to_secret(&self) -> BTreeMap<String, ByteString> {
        self.data.iter().map(|(key, value)| (key.clone(), ByteString(value.clone()))).collect()
    }

    /// The authorities to trust, as PEM: the `caBundle`.
    pub(super) fn ca_bundle(&self) -> &[u8] {
        self.get(CA)
    }

    fn get(&self, key: &str) -> &[u8] {
        self.data.get(key).map(Vec::as_slice).unwrap_or_default()
    }

    fn with(mut self, entries: [(&str, Vec<u8>); 3]) -> Self {
        self.data.extend(entries.map(|(key, value)| (key.to_owned(), value)));
        self
    }

    /// Configuration of a server that shows the current certificate.
    pub(super) fn server_config(&self) -> Result<ServerConfig, CertificateError> {
        let (certificates, key) = parse(self, CERTIFICATE, KEY)?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(certificates, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    /// Whether a client that trusts this content's authorities accepts the certificate under every name at that time.
    fn accepted(
        &self,
        certificate: &'static str,
        key: &'static str,
        names: &[String],
        at: SystemTime,
    ) -> bool {
        let verify = || -> Result<(), CertificateError> {
            let (certificates, key) = parse(self, certificate, key)?;
            // Refuses a key that is not the certificate's.
            ServerConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()?
                .with_no_client_auth()
                .with_single_cert(certificates.clone(), key)?;
            let mut roots = RootCertStore::empty();
            for authority in CertificateDer::pem_slice_iter(self.ca_bundle()) {
                roots.add(authority.map_err(|error| read_error(CA, error))?)?;
            }
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
                .build()
                .map_err(|error| read_error(CA, error))?;
            let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap_or_default());
            let leaf = certificates.first().ok_or_else(|| read_error(certificate, "no certificate"))?;
            for name in names {
                let name =
                    ServerName::try_from(name.as_str()).map_err(|error| read_error(certificate, error))?;
                verifier.verify_server_cert(leaf, &certificates[1..], &name, &[], at)?;
            }
            Ok(())
        };
        verify().is_ok()
    }
}

/// Judges the content of the Secret for a server of these names.
///
/// # Errors
/// A certificate is to be made and cannot: a name is no DNS name or address.
pub(super) fn judge(
    current: &Material,
    names: &[String],
    now: SystemTime,
) -> Result<Verdict, CertificateError> {
    let good = |certificate, key, at| current.accepted(certificate, key, names, at);
    let later = now + RENEW_BEFORE;
    if !good(CERTIFICATE, KEY, now) {
        let (authority, certificate, key) = make(names, now)?;
        let fresh = Material::default().with([(CA, authority), (CERTIFICATE, certificate), (KEY, key)]);
        return Ok(Verdict::Replace(Box::new(fresh)));
    }
    if good(NEXT_CERTIFICATE, NEXT_KEY, later) {
        let mut next = current.clone();
        for (from, to) in [(NEXT_CERTIFICATE, CERTIFICATE), (NEXT_KEY, KEY)] {
            let value = next.data.remove(from).unwrap_or_default();
            next.data.insert(to.to_owned(), value);
        }
        return Ok(Verdict::Promote(Box::new(next)));
    }
    if good(CERTIFICATE, KEY, later) {
        return Ok(Verdict::Good);
    }
    let (mut authority, certificate, key) = make(names, now)?;
    // Of the authorities so far only the newest, the first one, can be that of the current certificate.
    authority.extend(first_pem(current.ca_bundle()));
    let next = current.clone().with([(CA, authority), (NEXT_CERTIFICATE, certificate), (NEXT_KEY, key)]);
    Ok(Verdict::Prepare(Box::new(next)))
}

/// An authority and a certificate for these names with its key, as PEM.
#[allow(clippy::type_complexity)]
fn make(names: &[String], now: SystemTime) -> Result<(Vec<u8>, Vec<u8>, Vec<u8>), CertificateError> {
    // Whole days: the day before absorbs clocks that differ.
    let day = |at: SystemTime, offset: i64| -> Result<_, CertificateError> {
        let date =
            jiff::Timestamp::try_from(at).map_err(CertificateError::Clock)?.to_zoned(jiff::tz::TimeZone::UTC);
        let date =
            date.date().checked_add(jiff::Span::new().days(offset)).map_err(CertificateError::Clock)?;
        Ok(date_time_ymd(date.year().into(), date.month().unsigned_abs(), date.day().unsigned_abs()))
    };
    let (not_before, not_after) = (day(now, -1)?, day(now + LIFETIME, 1)?);
    let failed = |source| CertificateError::Make { names: names.to_vec(), source };

    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "Kerf webhook authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    (authority.not_before, authority.not_after) = (not_before, not_after);
    let authority_key = KeyPair::generate().map_err(failed)?;
    let authority_pem = authority.self_signed(&authority_key).map_err(failed)?.pem();
    let issuer = Issuer::new(authority, authority_key);

    let mut server = CertificateParams::new(names.to_vec()).map_err(failed)?;
    server.distinguished_name.push(DnType::CommonName, "Kerf webhook");
    server.use_authority_key_identifier_extension = true;
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    (server.not_before, server.not_after) = (not_before, not_after);
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = server.signed_by(&key, &issuer).map_err(failed)?.pem();
    Ok((authority_pem.into_bytes(), certificate.into_bytes(), key.serialize_pem().into_bytes()))
}

fn parse(
    material: &Material,
    certificate: &'static str,
    key: &'static str,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), CertificateError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(material.get(certificate)).collect();
    let certificates = certificates.map_err(|error| read_error(certificate, error))?;
    let private = PrivateKeyDer::from_pem_slice(material.get(key)).map_err(|error| read_error(key, error))?;
    Ok((certificates, private))
}

fn read_error(key: &'static str, reason: impl std::fmt::Display) -> CertificateError {
    CertificateError::Read { key, reason: reason.to_string() }
}

/// The first block of a PEM text.
fn first_pem(text: &[u8]) -> Vec<u8> {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let end = text.windows(END.len()).position(|window| window == END);
    end.map_or_else(Vec::new, |end| [&text[..end + END.len()], b"\n"].concat())
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 2] = ["kerf-webhook.kerf-system.svc", "127.0.0.1"];
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn names() -> Vec<String> {
        NAMES.map(str::to_owned).to_vec()
    }

    fn fresh(now: SystemTime) -> Material {
        match judge(&Material::default(), &names(), now).unwrap() {
            Verdict::Replace(fresh) => *fresh,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_empty_secret_gets_a_certificate_that_serves() {
        let now = SystemTime::now();
        let material = fresh(now);
        assert_eq!(judge(&material, &names(), now).unwrap(), Verdict::Good);
        assert!(material.server_config().is_ok());
        assert_eq!(Material::from_secret(Some(&material.to_secret())), material);
    }

    #[test]
    fn a_torn_or_foreign_secret_is_replaced() {
        let now = SystemTime::now();
        let (one, other) = (fresh(now), fresh(now));
        for key in [CA, CERTIFICATE, KEY] {
            for value in [b"garbage".to_vec(), other.get(key).to_vec()] {
                let mut torn = one.clone();
                torn.data.insert(key.to_owned(), value);
                assert!(matches!(judge(&torn, &names(), now).unwrap(), Verdict::Replace(_)), "{key}");
            }
        }
        let more = [names(), vec!["kerf.example".to_owned()]].concat();
        assert!(matches!(judge(&one, &more, now).unwrap(), Verdict::Replace(_)), "a name is missing");
    }

    #[test]
    fn rotation_trusts_first_and_serves_later() {
        let start = SystemTime::now();
        let first = fresh(start);
        let due = start + LIFETIME - RENEW_BEFORE + 2 * DAY;
        assert_eq!(judge(&first, &names(), due - 4 * DAY).unwrap(), Verdict::Good);

        let Verdict::Prepare(prepared) = judge(&first, &names(), due).unwrap() else {
            panic!("not prepared")
        };
        assert_eq!(prepared.get(CERTIFICATE), first.get(CERTIFICATE), "the current one goes on serving");
        assert!(prepared.accepted(CERTIFICATE, KEY, &names(), due));
        assert!(prepared.accepted(NEXT_CERTIFICATE, NEXT_KEY, &names(), due));

        let Verdict::Promote(promoted) = judge(&prepared, &names(), due).unwrap() else {
            panic!("not promoted")
        };
        assert_eq!(promoted.get(CERTIFICATE), prepared.get(NEXT_CERTIFICATE));
        assert_eq!(
            promoted.ca_bundle(),
            prepared.ca_bundle(),
            "replicas still showing the old one stay trusted"
        );
        assert!(!promoted.data.contains_key(NEXT_KEY));
        assert_eq!(judge(&promoted, &names(), due).unwrap(), Verdict::Good);

        let again = due + LIFETIME - RENEW_BEFORE + 2 * DAY;
        let Verdict::Prepare(prepared) = judge(&promoted, &names(), again).unwrap() else {
            panic!("not prepared")
        };
        let authorities = CertificateDer::pem_slice_iter(prepared.ca_bundle()).count();
        assert_eq!(authorities, 2, "the bundle does not grow");
        assert!(prepared.accepted(CERTIFICATE, KEY, &names(), again));
    }

    #[test]
    fn an_expired_certificate_is_replaced_at_once() {
        let start = SystemTime::now();
        let old = fresh(start);
        assert!(matches!(judge(&old, &names(), start + LIFETIME + 3 * DAY).unwrap(), Verdict::Replace(_)));
    }

    #[test]
    fn a_name_that_is_none_is_an_error() {
        assert!(judge(&Material::default(), &["no\u{e4}me".to_owned()], SystemTime::now()).is_err());
    }
}
