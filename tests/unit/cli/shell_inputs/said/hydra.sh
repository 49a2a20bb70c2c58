python3 -m verl.trainer.main_ppo trainer.logger=['console','wandb'] data.files="['/a','/b']" x='${y}' +a.b=1 ~c
