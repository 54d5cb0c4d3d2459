"""Which environment variables look secret."""

import pytest

from gpuyard.model.shell_environment import secret_variables


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "TOKEN", "GITHUB_TOKEN_2", "WANDB_API_KEY", "OPENAI_APIKEY", "SSH_KEY", "KEY", "PGPASSWORD",
        "DB_PWD", "MYSQL_PASS", "GITHUB_PAT", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "CLIENT_SECRET", "my_secret",
        "GOOGLE_APPLICATION_CREDENTIALS", "GPG_PASSPHRASE",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert secret_variables({name: "x", "HOME": "/home/ada"}) == (name,)


@pytest.mark.parametrize(
    "name",
    ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYMAP", "XDG_PATH", "COMPASS", "AWS_REGION"],
)
def test_names_of_other_variables(name: str) -> None:
    assert secret_variables({name: "/x"}) == ()


def test_a_url_with_a_password_is_a_secret() -> None:
    urls = {"A_URL": "postgres://ada:pw@db:5432/runs", "B_URL": "http://proxy:3128", "C": "http://ada@host:80/x:y@z"}
    assert secret_variables(urls) == ("A_URL",)


def test_patterns_add_names_and_take_names_out_and_the_last_counts() -> None:
    environment = dict.fromkeys(["LAB_CODE", "LAB_NAME", "GPG_KEY", "HF_TOKEN"], "x")
    assert secret_variables(environment, ("LAB_*", "!LAB_NAME", "!GPG_KEY")) == ("HF_TOKEN", "LAB_CODE")
    assert secret_variables(environment, ("!*",)) == ()
    assert secret_variables(environment, ("!*", "HF_*")) == ("HF_TOKEN",)
