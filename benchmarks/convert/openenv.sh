#!/usr/bin/env bash
# Servers of OpenEnv for trl_examples.py: openenv.sh FOLDER OPENENV MINIWOB, where OPENENV and MINIWOB are checkouts (or bare ones) of
# huggingface/OpenEnv and Farama-Foundation/miniwob-plusplus. It installs into FOLDER, starts the servers on ports 9001 to 9007, and waits; they
# end with it. FOLDER/clients is what trl_examples.py gets as --clients: OpenEnv 0.2.1, whose clients are not async, as TRL's examples use them.
# Chromium has to be there. CARLA is OpenEnv's own mock.
set -euo pipefail
folder=$(realpath -m "$1") openenv=$2 miniwob=$3
clients=$folder/clients servers=$folder/servers
mkdir -p "$clients" "$servers" "$folder/pages"
take() { # CHECKOUT COMMIT FOLDER PATH...
  for path in "${@:4}"; do
    mkdir -p "$3/${path##*/}"
    git -C "$1" archive "$2:$path" | tar x -C "$3/${path##*/}"
  done
}
take "$openenv" v0.2.1 "$clients" envs/textarena_env envs/openspiel_env envs/browsergym_env
take "$openenv" a75310c5^ "$clients" envs/echo_env # the last one with the action that the example uses
take "$openenv" v0.3.1 "$clients" envs/carla_env
take "$openenv" v0.3.1 "$servers" envs/carla_env envs/browsergym_env
take "$miniwob" HEAD "$folder/pages" miniwob/html
for version in 0.2.1 0.3.0; do
  python3 -m venv "$folder/$version"
  packages=(openenv-core==$version)
  [ $version = 0.2.1 ] && packages+=(textarena==0.7.4 open_spiel==2.0.2 nltk==3.10.4) || packages+=(browsergym-core==0.14.3 browsergym-miniwob==0.14.3)
  "$folder/$version/bin/pip" install -q "${packages[@]}"
done
ln -sfn "$folder"/0.2.1/lib/python3*/site-packages "$clients/site-packages"
browser=$folder/browsers/chromium-1117 # the name that playwright 1.44 looks for
mkdir -p "$browser/chrome-linux"
ln -sf "$(command -v chromium)" "$browser/chrome-linux/chrome"
trap 'kill $(jobs -p)' EXIT
serve() { # VERSION PATH PACKAGE PORT [VARIABLE=VALUE...]
  env PYTHONPATH="$2" "${@:5}" "$folder/$1/bin/python" -m uvicorn "$3.server.app:app" --port "$4" --log-level warning &
}
serve 0.2.1 "$clients" echo_env 9001
serve 0.2.1 "$clients" textarena_env 9002 TEXTARENA_ENV_ID=Wordle-v0 # nltk fetches its words
serve 0.2.1 "$clients" textarena_env 9003 TEXTARENA_ENV_ID=Sudoku-v0
serve 0.2.1 "$clients" openspiel_env 9004 OPENSPIEL_GAME=catch
serve 0.3.0 "$servers" carla_env 9005 CARLA_MODE=mock
serve 0.3.0 "$servers" browsergym_env 9006 BROWSERGYM_TASK_NAME=click-test PLAYWRIGHT_BROWSERS_PATH="$folder/browsers" \
  MINIWOB_URL=http://localhost:9007/miniwob/
python3 -m http.server 9007 --directory "$folder/pages/html" &
wait
