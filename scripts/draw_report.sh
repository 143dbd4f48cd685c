#!/usr/bin/env bash
# Pictures of the report for the docs, as headless Chromium shows it (Debian's package `chromium`).
#   bash scripts/draw_report.sh report outputs/quickstart/rl      docs/images/report.png: its beginning
#   bash scripts/draw_report.sh samples outputs/navigation/rl     docs/images/samples.png: its samples
set -euo pipefail

part="${1:-}" run="${2:-}"
case "$part" in report | samples) ;; *) sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;; esac
[ -f "$run/report.html" ] || { echo "draw_report: $run/report.html is missing; run mslime report $run" >&2; exit 2; }
browser="$(command -v chromium || command -v chromium-browser || command -v google-chrome)" ||
  { echo "draw_report: needs Chromium: apt-get install chromium" >&2; exit 2; }
page="file://$(cd "$run" && pwd)/report.html"
image="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/docs/images/$part.png"
height=1500
if [ "$part" = samples ]; then # a page screenshot starts at its top, a frame's does not
  height=470 frame="$(mktemp --suffix .html)"
  trap 'rm -f "$frame"' EXIT
  echo "<body style='margin:0'><iframe src='$page#samples-section' style='border:0;width:1280px;height:${height}px'>" > "$frame"
  page="file://$frame"
fi
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size="1280,$height" \
  --virtual-time-budget=5000 --screenshot="$image" "$page" 2> /dev/null
echo "$image"
