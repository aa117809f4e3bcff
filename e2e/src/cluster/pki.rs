//! The cluster's certificate authority, and the identities that it certifies.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};

pub(crate) struct Pki {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
}

/// A certificate and its key, as files.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

impl Pki {
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("failed to create {}", dir.display()))?;
        let key = KeyPair::generate().context("failed to make the authority's key")?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "kerf-e2e");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let ca_pem = params.self_signed(&key).context("failed to make the authority's certificate")?.pem();
        let pki = Self { dir: dir.to_owned(), issuer: Issuer::new(params, key), ca_pem };
        fs::write(pki.ca(), &pki.ca_pem)?;
        // Signs service account tokens.
        let tokens = KeyPair::generate().context("failed to make the key for service account tokens")?;
        fs::write(pki.service_account_key(), tokens.serialize_pem())?;
        fs::write(pki.service_account_public_key(), tokens.public_key_pem())?;
        Ok(pki)
    }

    pub(crate) fn ca(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    pub(crate) fn service_account_key(&self) -> PathBuf {
        self.dir.join("service-account.key")
    }

    pub(crate) fn service_account_public_key(&self) -> PathBuf {
        self.dir.join("service-account.pub")
    }

    /// A server at these names and addresses.
    pub(crate) fn server(&self, file: &str, names: &[&str]) -> Result<Identity> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params =
            CertificateParams::new(names).context("failed to name a server in its certificate")?;
        params.distinguished_name.push(DnType::CommonName, file);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.certify(file, params)
    }

    /// A user, in a group where one is given.
    pub(crate) fn user(&self, file: &str, name: &str, group: Option<&str>) -> Result<Identity> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.certify(file, params)
    }

    fn certify(&self, file: &str, mut params: CertificateParams) -> Result<Identity> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().with_context(|| format!("failed to make the key of {file}"))?;
        let cert =
            params.signed_by(&key, &self.issuer).with_context(|| format!("failed to certify {file}"))?;
        let identity = Identity {
            cert: self.dir.join(format!("{file}.crt")),
            key: self.dir.join(format!("{file}.key")),
        };
        fs::write(&identity.cert, cert.pem())?;
        fs::write(&identity.key, key.serialize_pem())?;
        Ok(identity)
    }

    /// A kubeconfig that needs no other file.
    pub(crate) fn kubeconfig(&self, server: &str, identity: &Identity) -> Result<Value> {
        Ok(self.kubeconfig_with(
            server,
            json!({
                "client-certificate-data": BASE64.encode(fs::read(&identity.cert)?),
                "client-key-data": BASE64.encode(fs::read(&identity.key)?),
            }),
        ))
    }

    pub(crate) fn kubeconfig_for_token(&self, server: &str, token: &str) -> Value {
        self.kubeconfig_with(server, json!({ "token": token }))
    }

    fn kubeconfig_with(&self, server: &str, user: Value) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "kerf-e2e",
                "cluster": { "server": server, "certificate-authority-data": BASE64.encode(&self.ca_pem) },
            }],
            "users": [{ "name": "user", "user": user }],
            "contexts": [{ "name": "kerf-e2e", "context": { "cluster": "kerf-e2e", "user": "user" } }],
            "current-context": "kerf-e2e",
        })
    }
}

/// Writes a kubeconfig. JSON is YAML.
pub(crate) fn write_kubeconfig(path: &Path, kubeconfig: &Value) -> Result<()> {
    fs::write(path, serde_json::to_vec_pretty(kubeconfig)?)
        .with_context(|| format!("failed to write {}", path.display()))
}
