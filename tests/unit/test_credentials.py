"""Credentials: tokens signed by our keys, and nobody else's renewed."""

from datetime import UTC, datetime, timedelta

import nkeys
import pytest

from infra.credentials import (
    ACCOUNT,
    USER,
    AccountSigner,
    CredentialError,
    expires_at,
    mint_user,
    new_seed,
    parse_creds,
    public_key,
    read_claims,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def entropy(fill: int = 7) -> bytes:
    return bytes([fill]) * 32


def signer() -> AccountSigner:
    seed = new_seed(ACCOUNT, lambda _: entropy(1))
    return AccountSigner(seed=seed, account_public=public_key(seed))


def test_the_same_claims_give_the_same_token() -> None:
    first, second = (
        signer().mint(name="a", issued_at=NOW, expires_at=LATER, entropy=lambda _: entropy())
        for _ in range(2)
    )
    assert first.jwt == second.jwt


def test_a_token_says_who_may_what_until_when() -> None:
    minted = signer().mint(name="agent", issued_at=NOW, expires_at=LATER, publish=["a.>"], subscribe=["b"])
    claims = read_claims(minted.jwt)
    assert claims["sub"] == minted.public_key
    assert claims["iss"] == signer().account_public
    assert claims["nats"]["pub"] == {"allow": ["a.>"]}
    assert claims["nats"]["sub"] == {"allow": ["b"]}
    assert expires_at(minted.jwt) == LATER
    assert "issuer_account" not in claims["nats"]


def test_an_empty_list_of_subjects_means_nothing_and_none_means_everything() -> None:
    nothing = read_claims(signer().mint(name="a", issued_at=NOW, publish=[], subscribe=[]).jwt)["nats"]
    everything = read_claims(signer().mint(name="a", issued_at=NOW).jwt)["nats"]
    assert nothing["pub"] == nothing["sub"] == {"deny": [">"]}
    assert everything["pub"] == everything["sub"] == {}


def test_a_credential_never_outlives_what_was_asked_for() -> None:
    minted = signer().mint(name="a", issued_at=NOW, expires_at=LATER + timedelta(milliseconds=900))
    assert expires_at(minted.jwt) == LATER


def test_a_signing_key_names_the_account_it_signs_for() -> None:
    signing_seed = new_seed(ACCOUNT, lambda _: entropy(2))
    coordinator = signer().mint(name="coordinator", issued_at=NOW)
    agents = AccountSigner.for_account_of(signing_seed, coordinator.creds_text())
    claims = read_claims(agents.mint(name="agent", issued_at=NOW).jwt)
    assert claims["iss"] == public_key(signing_seed)
    assert claims["nats"]["issuer_account"] == signer().account_public


def test_a_signing_key_learns_its_account_from_a_user_that_was_signed_by_another_signing_key() -> None:
    other = AccountSigner(
        seed=new_seed(ACCOUNT, lambda _: entropy(3)), account_public=signer().account_public
    )
    coordinator = other.mint(name="coordinator", issued_at=NOW)
    agents = AccountSigner.for_account_of(signer().seed, coordinator.creds_text())
    assert agents.account_public == signer().account_public


def test_a_user_key_is_refused_as_signing_key() -> None:
    creds = signer().mint(name="a", issued_at=NOW).creds_text()
    with pytest.raises(CredentialError, match="begins with SA"):
        AccountSigner.for_account_of(new_seed(USER), creds)


def test_a_creds_file_is_read_back() -> None:
    minted = signer().mint(name="a", issued_at=NOW)
    assert parse_creds(minted.creds_text()) == minted


def test_a_creds_file_without_its_seed_or_with_another_users_is_refused() -> None:
    minted, other = (signer().mint(name=name, issued_at=NOW) for name in "ab")
    assert minted.seed is not None
    assert other.seed is not None
    with pytest.raises(CredentialError, match="USER NKEY SEED"):
        parse_creds(minted.creds_text().split("\n\n")[0])
    with pytest.raises(CredentialError, match="own seed"):
        parse_creds(minted.creds_text().replace(minted.seed, other.seed))


def test_a_bearer_and_a_user_with_a_key_of_its_own_have_no_seed_here() -> None:
    bearer = signer().mint(name="guest", issued_at=NOW, bearer=True)
    own = public_key(new_seed(USER))
    given = mint_user(signer().seed, signer().account_public, name="a", issued_at=NOW, user_public=own)
    assert read_claims(bearer.jwt)["nats"]["bearer_token"] is True
    assert bearer.seed is given.seed is None
    assert given.public_key == own
    with pytest.raises(CredentialError, match="no seed here"):
        bearer.creds_text()


def test_renewal_keeps_the_user_and_its_rights_and_moves_the_end() -> None:
    old = signer().mint(
        name="agent", issued_at=NOW, expires_at=LATER, publish=["a.>"], responses_max=1, responses_ttl_s=2
    )
    new = signer().renew(old.jwt, issued_at=NOW, expires_at=LATER + timedelta(hours=1))
    before, after = read_claims(old.jwt), read_claims(new)
    assert expires_at(new) == LATER + timedelta(hours=1)
    assert {key: after[key] for key in ("sub", "name", "nats", "iss")} == {
        key: before[key] for key in ("sub", "name", "nats", "iss")
    }
    assert after["jti"] != before["jti"]


def test_a_forged_a_foreign_or_an_expired_token_is_not_renewed() -> None:
    other = new_seed(ACCOUNT, lambda _: entropy(9))
    foreign = AccountSigner(seed=other, account_public=public_key(other)).mint(name="a", issued_at=NOW)
    mine = signer().mint(name="a", issued_at=NOW, expires_at=LATER, publish=["a"])
    more = signer().mint(name="a", issued_at=NOW, expires_at=LATER, publish=[">"])
    forged = ".".join((*more.jwt.split(".")[:2], mine.jwt.split(".")[2]))
    for jwt in (foreign.jwt, forged):
        with pytest.raises(CredentialError, match="not signed by"):
            signer().renew(jwt, issued_at=NOW, expires_at=LATER)
    with pytest.raises(CredentialError, match="expired"):
        signer().renew(mine.jwt, issued_at=LATER, expires_at=LATER + timedelta(hours=1))


def test_no_secret_is_in_a_repr() -> None:
    minted = signer().mint(name="a", issued_at=NOW)
    assert minted.seed is not None
    shown = repr(minted) + repr(signer())
    assert minted.jwt not in shown
    assert minted.seed not in shown
    assert signer().seed not in shown


def test_what_is_no_seed_and_no_token_is_said() -> None:
    with pytest.raises(CredentialError, match="not an nkey seed"):
        public_key("SUperman")
    with pytest.raises(CredentialError, match="not a NATS token"):
        read_claims("a.b")
    with pytest.raises(CredentialError, match="public key"):
        mint_user(signer().seed, signer().account_public, name="a", issued_at=NOW, user_public="AXYZ")


def test_the_signature_is_the_fields_own() -> None:
    minted = signer().mint(name="a", issued_at=NOW)
    head, _, signature = minted.jwt.rpartition(".")
    import base64  # noqa: PLC0415

    raw = base64.urlsafe_b64decode(signature + "==")
    assert nkeys.from_seed(signer().seed.encode()).verify(head.encode(), raw)
