N=3
read -r -d '' A <<'EOF'
line $N \
  two
EOF
B=$(cat <<EOF
say $N \$N
EOF
)
trl "$A" "$B"
cat <<EOF > config.yaml
trl not a command
EOF
