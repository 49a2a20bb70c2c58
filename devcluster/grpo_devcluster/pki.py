"""Certificates, tokens and kubeconfigs of one cluster."""

import base64
import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Names and groups to which Kubernetes' bootstrap roles are bound.
USERS = {
    "admin": ("admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
    "kube-proxy": ("system:kube-proxy", ""),
    "coredns": ("system:coredns", ""),
    "kwok": ("kwok", "system:masters"),
}


@dataclass(frozen=True)
class Pki:
    """Keys, certificates and tokens by which a cluster's programs trust each other; made once, kept below `folder`."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def service_account_key(self) -> Path:
        return self.folder / "service-account.key"

    @property
    def service_account_public(self) -> Path:
        return self.folder / "service-account.pub"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.csv"

    def certificate(self, name: str) -> tuple[Path, Path]:
        """Return the certificate file and the key file of `name`."""
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def create(self, addresses: Sequence[str], nodes: Sequence[str] = ()) -> None:
        """Create everything, unless it exists."""
        if self.tokens.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca_key = self._key("ca.key")
        ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "grpo-devcluster")])
        ca_certificate = _builder(ca_name, ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=0))
        _write(self.ca, ca_certificate.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

        self._issue("apiserver", ca_name, ca_key, ExtendedKeyUsageOID.SERVER_AUTH, addresses)
        self._issue("apiserver-kubelet-client", ca_name, ca_key, ExtendedKeyUsageOID.CLIENT_AUTH, ())
        public = self._key("service-account.key").public_key()
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        _write(self.service_account_public, pem)

        users = USERS | {f"kubelet-{node}": (f"system:node:{node}", "system:nodes") for node in nodes}
        lines = [
            f'{secrets.token_hex(24)},{user},{name},"{group}"' if group else f"{secrets.token_hex(24)},{user},{name}"
            for name, (user, group) in users.items()
        ]
        # Written last: its existence means that everything else exists.
        _write(self.tokens, ("\n".join(lines) + "\n").encode())

    def token(self, name: str) -> str:
        """Return the bearer token of the user or program `name`."""
        for line in self.tokens.read_text().splitlines():
            token, _user, uid, *_groups = line.split(",")
            if uid == name:
                return token
        raise KeyError(f"no token was made for {name}")

    def kubeconfig(self, name: str, server: str, target: Path) -> Path:
        """Write a kubeconfig that refers to no other file, so that it can be copied anywhere on this machine."""
        cluster = {"server": server, "certificate-authority-data": _base64(self.ca.read_bytes())}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "devcluster", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": self.token(name)}}],
            "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": name}}],
            "current-context": "devcluster",
        }
        _write(target, yaml.safe_dump(content).encode())
        return target

    def _key(self, file: str) -> ec.EllipticCurvePrivateKey:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(self.folder / file, pem)
        return key

    def _issue(
        self,
        name: str,
        ca_name: x509.Name,
        ca_key: ec.EllipticCurvePrivateKey,
        usage: x509.ObjectIdentifier,
        hosts: Sequence[str],
    ) -> None:
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:masters"),
                x509.NameAttribute(NameOID.COMMON_NAME, name),
            ]
        )
        key = self._key(f"{name}.key")
        builder = _builder(subject, ca_name, key, x509.BasicConstraints(ca=False, path_length=None))
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        pem = builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        _write(self.folder / f"{name}.crt", pem)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, constraints: x509.BasicConstraints
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A virtual machine's clock may be set back after a resume.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(constraints, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
